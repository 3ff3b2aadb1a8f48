"""Reading tensors from files, with any size of pieces, number of readers and read-ahead."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipstream.runner.loading.file_reader import Stretch, read_tensors

CPU = torch.device("cpu")
SHAPES = [(3, 5), (0, 4), (1000,), (7, 11, 2), (), (64, 64)]


def write(path: Path, seed: int) -> tuple[list[Stretch], list[torch.Tensor]]:
    """A file of tensors with gaps between them."""
    generator = torch.Generator().manual_seed(seed)
    stretches, tensors, data = [], [], b"head"
    for index, shape in enumerate(SHAPES):
        dtype = (torch.float32, torch.bfloat16)[index % 2]
        tensor = torch.randn(shape, generator=generator).to(dtype)
        stretches.append(Stretch(path, len(data), shape, dtype))
        tensors.append(tensor)
        data += tensor.reshape(-1).view(torch.uint8).numpy().tobytes() + b"gap"
    path.write_bytes(data)
    return stretches, tensors


@pytest.mark.parametrize(
    ("readers", "piece", "ahead"), [(1, 3, 1), (3, 7, 100), (8, 64, 1 << 20), (2, 1 << 20, 0)]
)
def test_tensors_come_in_order(tmp_path: Path, readers: int, piece: int, ahead: int) -> None:
    first, second = write(tmp_path / "a", 0), write(tmp_path / "b", 1)
    stretches = [*second[0], *first[0], second[0][2]]
    read = list(read_tensors(stretches, CPU, readers, piece, ahead))
    expected = [*second[1], *first[1], second[1][2]]
    assert [(t.shape, t.dtype) for t in read] == [(t.shape, t.dtype) for t in expected]
    assert all(torch.equal(a, b) for a, b in zip(read, expected, strict=True))


def test_a_short_file_is_an_error_of_its_tensor(tmp_path: Path) -> None:
    stretches, tensors = write(tmp_path / "a", 0)
    data = (tmp_path / "a").read_bytes()
    (tmp_path / "a").write_bytes(data[:-100])
    reading = read_tensors(stretches, CPU, 2, 50)
    for tensor in tensors[:-1]:
        assert torch.equal(next(reading), tensor)
    with pytest.raises(OSError, match="ends before the tensor does"):
        next(reading)
    (tmp_path / "a").unlink()
    with pytest.raises(OSError):
        next(read_tensors(stretches, CPU))


def test_stopping_early_leaves_no_thread(tmp_path: Path) -> None:
    import threading

    stretches, tensors = write(tmp_path / "a", 0)
    reading = read_tensors(stretches, CPU, 2, 16)
    assert torch.equal(next(reading), tensors[0])
    reading.close()  # type: ignore[attr-defined]
    assert not [t for t in threading.enumerate() if t.name.startswith("read-weights")]
