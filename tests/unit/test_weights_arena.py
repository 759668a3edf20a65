"""Arenas: memory given back is really gone from this process, and comes back with the same contents."""

from __future__ import annotations

import gc
import random
from pathlib import Path

import psutil
import pytest

from tests.held import held_of, least_growth, written_memory

pytestmark = pytest.mark.torch
SIZE = 8 << 20
SLACK = 2 << 20


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(random.Random(1).randbytes(SIZE))
    return path


def test_anonymous_memory_goes_back_and_reads_as_zeros() -> None:
    import torch

    from services.weights.arena import HostArena

    arena = HostArena(SIZE)
    tensor = arena.tensor(torch.float32, (2, SIZE // 8), 0)
    assert arena.resident_bytes() <= SLACK
    tensor.fill_(3.0)
    assert arena.resident_bytes() >= SIZE
    arena.release()
    assert arena.resident_bytes() <= 0.1 * SIZE
    assert not tensor.any()
    arena.close()
    arena.close()
    assert arena.resident_bytes() == 0


def test_the_whole_process_shrinks() -> None:
    """What resident_bytes says is what the system sees of us."""
    import torch

    from services.weights.arena import HostArena

    size = 64 << 20
    arena = HostArena(size)
    tensor = arena.tensor(torch.uint8, (size,), 0)
    empty = written_memory()
    tensor.fill_(1)
    full = written_memory()
    arena.release()
    assert full - empty >= 0.9 * size
    assert full - written_memory() >= 0.9 * size


def test_a_parked_file_leaves_the_process_and_comes_back(file: Path) -> None:
    import torch

    from services.weights.arena import FileArena

    arena = FileArena(file, SIZE)
    tensor = arena.tensor(torch.uint8, (SIZE,), 0)
    arena.unpark()
    assert arena.resident_bytes() >= SIZE
    arena.park()
    assert arena.resident_bytes() <= 0.1 * SIZE
    arena.unpark()
    assert arena.resident_bytes() >= SIZE
    assert bytes(tensor.numpy().data) == file.read_bytes()
    arena.forget()
    assert arena.resident_bytes() == 0
    arena.unpark()
    assert bytes(arena.view) == file.read_bytes()


def test_a_hundred_cycles_leak_nothing(file: Path) -> None:
    from services.weights.arena import FileArena

    me, arena = psutil.Process(), FileArena(file, SIZE)

    def cycles(count: int) -> int:
        for _ in range(count):
            arena.unpark()
            arena.park()
        gc.collect()
        return me.memory_info().rss

    before, held = cycles(5), held_of(file.parent)
    assert least_growth([before, *(cycles(35) for _ in range(3))]) <= SLACK
    assert held_of(file.parent) == held


def test_a_file_that_was_removed_is_still_ours(file: Path) -> None:
    from services.weights.arena import FileArena

    wanted, arena = file.read_bytes(), FileArena(file, SIZE)
    file.unlink()
    arena.forget()
    assert arena.resident_bytes() == 0
    arena.unpark()
    assert bytes(arena.view) == wanted


def test_writing_to_a_private_mapping_changes_no_file(file: Path) -> None:
    import torch

    from services.weights.arena import FileArena

    before = file.read_bytes()
    arena = FileArena(file, SIZE)
    tensor = arena.tensor(torch.uint8, (SIZE,), 0)
    tensor.zero_()
    assert file.read_bytes() == before
    arena.park()
    assert bytes(tensor.numpy().data) == before


def test_writing_to_a_shared_mapping_changes_it(file: Path) -> None:
    import torch

    from services.weights.arena import FileArena

    FileArena(file, SIZE, shared=True).tensor(torch.uint8, (SIZE,), 0).fill_(7)
    assert file.read_bytes() == bytes([7]) * SIZE


def test_a_file_cut_off_behind_our_back_is_an_error_and_no_crash(file: Path) -> None:
    from services.weights.arena import FileArena

    arena = FileArena(file, SIZE)
    with file.open("r+b") as handle:
        handle.truncate(SIZE // 2)
    with pytest.raises(OSError, match="madvise"):
        arena.unpark()
    with pytest.raises(ValueError, match=str(SIZE)):
        FileArena(file, SIZE)


@pytest.mark.parametrize(("shape", "offset"), [((SIZE + 1,), 0), ((1,), SIZE), ((4,), -1)])
def test_tensors_lie_inside(shape: tuple[int, ...], offset: int) -> None:
    import torch

    from services.weights.arena import HostArena

    with pytest.raises(ValueError, match="inside"):
        HostArena(SIZE).tensor(torch.uint8, shape, offset)


def test_arenas_of_any_size_and_dtype() -> None:
    import torch

    from services.weights.arena import HostArena

    for nbytes in (0, 1, 4095, 4096, 4097):
        arena = HostArena(nbytes)
        assert arena.tensor(torch.uint8, (nbytes,), 0).numel() == nbytes
        assert arena.tensor(torch.bfloat16, (0, 3), 0).shape == (0, 3)
    scalar = HostArena(64).tensor(torch.float8_e4m3fn, (), 8)
    assert scalar.shape == ()
