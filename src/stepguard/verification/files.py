"""One file of any kind: told by its first bytes, read by its format, scanned, judged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stepguard.records.verification import Role
from stepguard.verification import roles
from stepguard.verification.bounded_file import Window, opened
from stepguard.verification.damage import Damaged, Notes
from stepguard.verification.file_layout import Layout
from stepguard.verification.safetensors_format import read_safetensors
from stepguard.verification.scan import scan
from stepguard.verification.torch_format import read_stream, read_zip
from stepguard.verification.value_rules import judge

Progress = Callable[[int], None]
"""Takes the number of bytes that were read since the last call."""
Read = Callable[[Window, Layout, Role | None], object]
SUFFIXES = frozenset({".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".pkl", ".pickle"})
SURE = frozenset({".pt", ".pth", ".ckpt", ".safetensors"})
"""Endings that promise a checkpoint. A `.bin` or `.pkl` may be anything, and is passed over if it
is.
"""
WEIGHTS = (
    "pytorch_model",
    "adapter_model",
    "optimizer",
    "model",
    "diffusion_pytorch_model",
    "random_states",
)
PICKLE_STARTS = frozenset(b"(])}cl].IFNSVd")
"""First bytes of a pickle of protocol 0 or 1, which has no header."""


def check_file(
    path: Path,
    progress: Progress,
    *,
    read: Read | None = None,
    allowed: frozenset[str] = frozenset(),
) -> Layout:
    """Read, scan and judge. Never raises for what is in the file."""
    layout = Layout(path, "unknown", 0, Notes(str(path)))
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(count)

    try:
        with opened(path) as window:
            layout.size = window.size
            try:
                (read or understand)(window, layout, roles.of_file(path.name))
                layout.whole = True
            except Damaged as damage:
                layout.notes.damaged(damage)
            scan(window, layout, advance)
    except Damaged as damage:
        layout.notes.damaged(damage)
    judge(layout, allowed)
    progress(max(0, layout.size - done))
    return layout


def understand(window: Window, layout: Layout, role: Role | None) -> None:
    """Fill the layout by the format that the first bytes tell."""
    head = window.at(0, 512)
    suffix = layout.path.suffix.lower()
    if not head:
        raise Damaged("torn", "is empty")
    if head.startswith(b"PK"):
        layout.format = "torch zip"
        read_zip(window, layout, role)
    elif suffix == ".safetensors" or _is_safetensors(head, window.size):
        layout.format = "safetensors"
        read_safetensors(window, layout, role)
    elif head[0] == 0x80 or (suffix in SUFFIXES and head[0] in PICKLE_STARTS):
        layout.format = "pickle"
        read_stream(window, layout, role)
    else:
        raise _strange(head, suffix)


def _is_safetensors(head: bytes, size: int) -> bool:
    return len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size


def _strange(head: bytes, suffix: str) -> Damaged:
    if not any(head):
        return Damaged("torn", "begins with zeros: its content never reached the disk")
    if head[257:262] == b"ustar":
        return Damaged(
            "format",
            "is a tar (torch.save before 0.1.10); load it with an old torch and save it again",
        )
    names = {b"GGUF": "GGUF", b"\x89HDF": "HDF5", b"\x93NUM": "NumPy"}
    known = names.get(head[:4])
    if known:
        return Damaged("format", f"is a {known} file, which is not read here")
    return Damaged(
        "malformed", f"begins with {head[:8].hex(' ')}, which no known checkpoint format does"
    )


def is_checkpoint_name(path: Path) -> bool:
    """By its ending; an unsure one counts if its name is one that libraries give to weights."""
    suffix = path.suffix.lower()
    return suffix in SURE or (suffix in SUFFIXES and path.name.lower().startswith(WEIGHTS))


def may_be_checkpoint(path: Path) -> bool:
    """A `.bin` or `.pkl` of another name: worth a look, no error if it is something else."""
    if path.suffix.lower() not in SUFFIXES or is_checkpoint_name(path):
        return False
    try:
        with opened(path) as window:
            head = window.at(0, 16)
    except Damaged:
        return False
    return head.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"))
