"""Texts with their latents: generated (toy) or read from `*_tokens.npz` and `*.npy`, and the
batches of a run.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

Batch = dict[str, Any]
TOPICS = 8
UNREADABLE = (OSError, ValueError, KeyError, EOFError)


@dataclass(frozen=True, slots=True)
class Pairs:
    """Tokens [n, length], which of them are text, and a latent [n, features] each."""

    tokens: Tensor
    real: Tensor
    latents: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def pick(self, chosen: Tensor | slice) -> Pairs:
        return Pairs(self.tokens[chosen], self.real[chosen], self.latents[chosen])


def toy_pairs(number: int, *, seed: int, length: int, vocabulary: int, features: int) -> Pairs:
    """Every topic has its own Markov chain over the tokens; the latent is the topic's vector and a
    little noise.
    """
    draws = torch.Generator().manual_seed(seed)
    chains = torch.softmax(
        3.0 * torch.randn(TOPICS, vocabulary, vocabulary, generator=draws), dim=-1
    )
    vectors = torch.randn(TOPICS, features, generator=draws)
    topic = torch.randint(0, TOPICS, (number,), generator=draws)
    tokens = torch.zeros(number, length, dtype=torch.long)
    tokens[:, 0] = torch.randint(0, vocabulary, (number,), generator=draws)
    for place in range(1, length):
        tokens[:, place] = torch.multinomial(
            chains[topic, tokens[:, place - 1]], 1, generator=draws
        )[:, 0]
    long = torch.randint(2 * length // 3, length + 1, (number,), generator=draws)
    real = torch.arange(length) < long[:, None]
    latents = vectors[topic] + 0.1 * torch.randn(number, features, generator=draws)
    return Pairs(torch.where(real, tokens, 0), real, latents)


def write_pairs(pairs: Pairs, token_dir: Path, latent_dir: Path) -> None:
    """One file a sample, as the original has it; the folders appear when they are complete."""
    for folder, suffix in ((latent_dir, ".npy"), (token_dir, "_tokens.npz")):
        part = folder.with_name(f".{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        for i in range(len(pairs)):
            path = part / f"{i:06d}{suffix}"
            if suffix == ".npy":
                np.save(path, pairs.latents[i].numpy())
            else:
                np.savez(
                    path, input_ids=pairs.tokens[i].numpy(), attention_mask=pairs.real[i].numpy()
                )
        shutil.rmtree(folder, ignore_errors=True)
        part.replace(folder)


def read_pairs(
    token_dir: Path, latent_dir: Path, *, shape: tuple[int, int], limit: int, on_unreadable: str
) -> Pairs:
    """`shape`: length and features. `zero` puts zeros where a file cannot be read, as the original
    does, silently.
    """
    files = sorted(token_dir.glob("*_tokens.npz"))[:limit]
    if not files:
        raise SystemExit(
            f"{token_dir} holds no *_tokens.npz; data.source=toy makes some, real_glosses.py real "
            f"ones."
        )
    length, features = shape
    tokens = torch.zeros(len(files), length, dtype=torch.long)
    real = torch.zeros(len(files), length, dtype=torch.bool)
    latents = torch.zeros(len(files), features)
    for i, path in enumerate(files):
        latent_path = latent_dir / (path.name.removesuffix("_tokens.npz") + ".npy")
        try:
            with np.load(path, allow_pickle=False) as text:
                ids, mask = text["input_ids"][:length], text["attention_mask"][:length]
            latents[i] = torch.from_numpy(np.load(latent_path, allow_pickle=False)).float()
            tokens[i, : len(ids)], real[i, : len(mask)] = (
                torch.from_numpy(ids).long(),
                torch.from_numpy(mask).bool(),
            )
        except (*UNREADABLE, RuntimeError) as fault:
            if on_unreadable == "refuse":
                raise SystemExit(
                    f"{path.name} or {latent_path.name} cannot be used: {fault}"
                ) from fault
            tokens[i], real[i], latents[i] = 0, False, 0.0
    return Pairs(tokens, real, latents)


def folders(data: Any) -> tuple[Path, Path] | None:
    """Where tokens and latents are; None: the toy data is kept in memory."""
    if data.folder is None and data.token_dir is None:
        return None
    base = Path(data.folder or ".") / data.source
    return Path(data.token_dir or base / "tokens"), Path(data.latent_dir or base / "latents")


def open_pairs(config: Any, *, first: bool, wait: Callable[[], None]) -> tuple[Pairs, Pairs]:
    """To train on, and held out. The first rank makes the toy files; `wait` is where the others
    wait for it.
    """
    data, model = config.data, config.model
    sizes = {
        "length": model.max_seq_len,
        "vocabulary": model.vocab_size,
        "features": model.latent_dim,
    }
    places = folders(data)
    if places is None:
        everything = toy_pairs(data.max_samples, seed=0, **sizes)
    else:
        if data.source == "toy" and first and not (places[0].is_dir() and places[1].is_dir()):
            tqdm.write(f"writing {data.max_samples} toy samples to {places[0].parent}")
            write_pairs(toy_pairs(data.max_samples, seed=0, **sizes), *places)
        wait()
        shape = (model.max_seq_len, model.latent_dim)
        everything = read_pairs(
            *places, shape=shape, limit=data.max_samples, on_unreadable=data.on_unreadable
        )
    if int(everything.tokens.max()) >= model.vocab_size:
        raise SystemExit(
            f"a token is {int(everything.tokens.max())}, model.vocab_size={model.vocab_size} has "
            f"none such."
        )
    order = torch.randperm(len(everything), generator=torch.Generator().manual_seed(1))
    held_out = max(1, int(len(everything) * data.val_ratio))
    return everything.pick(order[held_out:]), everything.pick(order[:held_out])


class Batches:
    """Micro-batches without end. What a batch holds, its random draws included, follows from its
    position alone.

    So a position is all that a resumed run needs, and ranks never see the same samples.
    """

    def __init__(
        self, pairs: Pairs, size: int, *, seed: int, types: TypeOf, ranks: tuple[int, int] = (0, 1)
    ) -> None:
        self.pairs, self.size, self.seed = pairs, size, seed
        self.rank, self.world = ranks
        self._type_of = types
        self.per_epoch = len(pairs) // (size * self.world)
        if self.per_epoch == 0:
            raise SystemExit(
                f"{len(pairs)} samples are less than one batch of {size} for {self.world} "
                f"processes."
            )
        self.position = 0

    def __iter__(self) -> Iterator[Batch]:
        while True:
            self.position += 1
            yield self.at(self.position - 1)

    def at(self, position: int) -> Batch:
        """Samples, their noise and their times."""
        epoch, index = divmod(position, self.per_epoch)
        order = torch.randperm(len(self.pairs), generator=_seeded(self.seed, epoch))
        begin = (index * self.world + self.rank) * self.size
        chosen = self.pairs.pick(order[begin : begin + self.size])
        draws = _seeded(self.seed, position, self.rank + 1)
        return {
            "input_ids": chosen.tokens,
            "attention_mask": chosen.real,
            "latent": chosen.latents,
            "t": torch.rand(self.size, generator=draws),
            "t_latent": torch.rand(self.size, generator=draws),
            "mask_draw": torch.rand(chosen.tokens.shape, generator=draws),
            "noise": torch.randn(chosen.latents.shape, generator=draws),
            "loss_type": self._type_of(position),
        }

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = int(state["position"])


TypeOf = Callable[[int], str]
"""The loss type of a position."""


def loss_types(config: Any) -> TypeOf:
    """`sequential` and `random` change it between optimizer steps, alike on every rank."""
    training, kind = config.training, config.loss.loss_type
    parts, seed = training.gradient_accumulation_steps, training.seed
    if kind == "sequential":
        schedule = [
            (str(stage["type"]), int(stage["steps"])) for stage in training.sequential_schedule
        ]
        cycle = [name for name, steps in schedule for _ in range(steps)]
        return lambda position: cycle[position // parts % len(cycle)]
    if kind == "random":
        weights = {str(name): float(weight) for name, weight in training.mode_weights.items()}
        names, chances = list(weights), torch.tensor(list(weights.values()))
        return lambda position: names[
            int(torch.multinomial(chances, 1, generator=_seeded(seed, position // parts, 99)))
        ]
    return lambda position: kind


def _seeded(*numbers: int) -> torch.Generator:
    mixed = 0
    for number in numbers:
        mixed = (mixed * 6364136223846793005 + number * 1442695040888963407 + 1) % 2**63
    return torch.Generator().manual_seed(mixed)
