"""Runs a Gluon kernel on the CPU: each role of a program is a thread, and a copy engine is another.

Gluon has no interpreter. Here the functions of a kernel's module run as plain Python over torch
tensors. Copies arrive late and are NaN until then, asynchronous products read their operands when
they are waited for, and barriers count arrivals and bytes as those of the hardware do. So a missing
wait becomes a wrong result, and a missing arrival a timeout. Layouts of registers are ignored.
"""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType, SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor
from triton.language import constexpr
from triton.runtime.jit import JITFunction

TIMEOUT = 60.0  # seconds until a wait counts as a deadlock
PANEL_BYTES = 128  # of a row in shared memory before the next row follows


def size_of(dtype: torch.dtype) -> int:
    """The bytes of a value on the GPU, where floats of 16 bits are what a test has in 32."""
    return min(dtype.itemsize, 2) if dtype.is_floating_point else dtype.itemsize


def unwritten(dtype: torch.dtype) -> float:
    """What memory holds that nothing has written."""
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max


class Pointer:
    """A pointer, or a tensor of pointers, into the memory of a torch tensor."""

    def __init__(self, tensor: Tensor, offset: Any = None) -> None:
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        self.memory = tensor.as_strided((size,), (1,), 0)
        self.offset = tensor.storage_offset() if offset is None else offset
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.offset + offset)

    def places(self, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """The offsets, 0 where masked, and the mask."""
        at = torch.as_tensor(self.offset)
        inside = (
            torch.ones_like(at, dtype=torch.bool) if mask is None else mask.broadcast_to(at.shape)
        )
        assert ((at >= 0) & (at < len(self.memory)) | ~inside).all(), "outside the tensor"
        return torch.where(inside, at, 0), inside


def load(
    pointer: Pointer, mask: Tensor | None = None, other: float = 0, cache_modifier: str = "",
    volatile: bool = False,
) -> Tensor:  # fmt: skip
    at, inside = pointer.places(mask if mask is None else torch.as_tensor(mask))
    return torch.where(inside, pointer.memory[at], other)


def store(pointer: Pointer, value: Tensor, mask: Tensor | None = None) -> None:
    at, inside = pointer.places(mask)
    pointer.memory[at[inside]] = value.broadcast_to(at.shape)[inside]


class Shared:
    """A part of shared memory: tiles of rows, in which panels of 128 bytes follow each other."""

    def __init__(self, memory: Tensor, shape: list[int]) -> None:
        self.memory, self.shape = memory, shape  # [numel]
        self.panel = PANEL_BYTES // size_of(memory.dtype)  # values

    def index(self, number: Any) -> Shared:
        size = self.memory.numel() // self.shape[0]
        assert 0 <= int(number) < self.shape[0], "outside the allocation"
        return Shared(self.memory[int(number) * size :][:size], self.shape[1:])

    def _reinterpret(self, _dtype: object, shape: list[int], _layout: object) -> Shared:
        values = torch.Size(shape).numel()  # a view may end before the memory does
        assert values <= self.memory.numel(), "outside the allocation"
        return Shared(self.memory[:values], list(shape))

    def permute(self, _order: object) -> Any:
        return SimpleNamespace(load=lambda _: self.load(None).T)

    def slice(self, start: int, length: int, dim: int) -> Part:
        return Part(self, dim, start, length)

    def load(self, _layout: object) -> Tensor:
        if self.shape[-1] <= self.panel:
            return self.memory.view(self.shape).clone()  # registers
        rows, columns = self.shape
        panels = self.memory.view(columns // self.panel, rows, self.panel)
        return panels.permute(1, 0, 2).reshape(rows, columns).clone()  # registers

    def put(self, box: Tensor) -> None:
        """Store a box as the copies of hardware do, whose rows are cut into panels."""
        if box.shape[-1] > self.panel:
            assert box.dim() == 2
            box = box.view(box.shape[0], -1, self.panel).permute(1, 0, 2)
        self.memory.copy_(box.reshape(-1))

    def store(self, value: Tensor) -> None:
        assert self.shape[-1] <= self.panel
        self.memory.copy_(value.reshape(-1))


class Part:
    """A part of a tile in shared memory, which can be loaded."""

    def __init__(self, whole: Any, *cut: int) -> None:
        self.whole, self.cut = whole, cut

    def slice(self, start: int, length: int, dim: int) -> Part:
        return Part(self, dim, start, length)

    def load(self, layout: object) -> Any:
        return self.whole.load(layout).narrow(*self.cut)


class Barrier:
    """A barrier in shared memory: a phase ends after all arrivals and all expected bytes."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0

    def index(self, _number: object) -> Barrier:
        return self


class Machine:
    """What stands for `gl`, `tma`, `mbarrier` and the products in a kernel's module."""

    fetched: ClassVar[list[tuple[int, int]]] = []  # first value and number of all prefetches

    def __init__(self, program: int, num_programs: int) -> None:
        self.changed = threading.Condition()
        self.failure: BaseException | None = None
        self.copies: queue.Queue[Any] = queue.Queue()
        self.products = threading.local()  # those in flight, of each role
        plain = lambda *_args, **_options: None  # noqa: E731
        self.gl = SimpleNamespace(
            load=load, store=store, static_range=range, zeros=self._zeros, full=self._full,
            arange=lambda low, high, layout: torch.arange(low, high), where=self._where,
            maximum=self._extreme(torch.maximum), minimum=self._extreme(torch.minimum),
            max=lambda x, axis: x.amax(axis), sum=lambda x, axis: x.sum(axis), exp2=torch.exp2,
            exp=torch.exp, inline_asm_elementwise=self._prefetch,
            associative_scan=lambda x, axis, _add: x.cumsum(axis), num_warps=lambda: 4,
            reshape=torch.reshape, permute=torch.permute, rsqrt=torch.rsqrt,
            split=lambda x: x.unbind(-1),
            join=lambda a, b: torch.stack((a, b), -1),
            convert_layout=lambda x, _layout, assert_trivial=False: x,
            cast=lambda x, to: torch.as_tensor(x).to(to),
            program_id=lambda _: torch.tensor(program),
            num_programs=lambda _: torch.tensor(num_programs), thread_barrier=plain,
            allocate_shared_memory=self._allocate, warp_specialize=self._warp_specialize,
            uint8=torch.uint8, int16=torch.int16, int32=torch.int32, int64=torch.int64,
            broadcast=torch.broadcast_tensors, constexpr=constexpr, float32=torch.float32,
            bfloat16=torch.float32, float8e4nv=torch.float8_e4m3fn, abs=torch.abs, div_rn=torch.div,
            full_like=torch.full_like,
            **dict.fromkeys(("BlockedLayout", "SliceLayout", "DotOperandLayout"), plain),
            **dict.fromkeys(("NVMMASharedLayout", "NVMMADistributedLayout"), plain),
            **dict.fromkeys(("SwizzledSharedLayout", "DistributedLinearLayout"), plain),
        )  # fmt: skip
        self.mbarrier = SimpleNamespace(
            MBarrierLayout=lambda: "barrier", init=self._init, expect=self._expect,
            arrive=self._arrive, wait=self._wait,
        )  # fmt: skip
        self.tma = SimpleNamespace(async_copy_global_to_shared=self._copy)
        self.async_copy = SimpleNamespace(
            async_copy_global_to_shared=self._copy_rows, mbarrier_arrive=self._arrive_after_rows
        )
        self.names = {
            "gl": self.gl, "tl": self.gl, "mbarrier": self.mbarrier, "tma": self.tma,
            "async_copy": self.async_copy, "fence_async_shared": plain,
            "gdc_wait": plain, "gdc_launch_dependents": plain,
            "warpgroup_mma": self._multiply, "warpgroup_mma_wait": self._wait_products,
            "mma_v2": lambda a, b, acc: acc + a.float() @ b.float(),
        }  # fmt: skip

    @staticmethod
    def _zeros(shape: list[int], dtype: torch.dtype, layout: object) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    @staticmethod
    def _full(shape: list[int], value: float, dtype: torch.dtype, layout: object) -> Tensor:
        return torch.full(shape, value, dtype=dtype)

    @staticmethod
    def _where(condition: Any, yes: Any, no: Any) -> Tensor:
        return torch.where(condition, yes, no)

    @staticmethod
    def _extreme(function: Any) -> Any:
        return lambda a, b: function(torch.as_tensor(a), torch.as_tensor(b))

    @staticmethod
    def _allocate(dtype: torch.dtype, shape: list[int], layout: object) -> Any:
        if layout == "barrier":
            barriers = [Barrier() for _ in range(shape[0])]
            if len(shape) == 1:
                return barriers[0]
            return SimpleNamespace(index=lambda number: barriers[int(number)])
        memory = torch.full((torch.Size(shape).numel(),), unwritten(dtype), dtype=dtype)
        return Shared(memory, list(shape))

    @staticmethod
    def _init(barrier: Barrier, count: int) -> None:
        barrier.count = barrier.pending = count

    def _change(self, barrier: Barrier, arrivals: int, num_bytes: int) -> None:
        with self.changed:
            barrier.pending -= arrivals
            barrier.bytes += num_bytes
            assert barrier.pending >= 0, "more arrivals than the barrier expects"
            if barrier.pending == 0 and barrier.bytes == 0:
                barrier.pending, barrier.phase = barrier.count, barrier.phase + 1
                self.changed.notify_all()

    def _arrive(self, barrier: Barrier, count: int, pred: Any = True) -> None:
        if pred:
            self._change(barrier, count, 0)

    def _expect(self, barrier: Barrier, num_bytes: int, pred: Any = True) -> None:
        if pred:
            self._change(barrier, 1, num_bytes)

    def _wait(self, barrier: Barrier, parity: Any, pred: Any = True) -> None:
        if not pred:
            return

        def passed() -> bool:
            return barrier.phase % 2 != int(parity) or self.failure is not None

        with self.changed:
            assert self.changed.wait_for(passed, TIMEOUT), "a role waits forever"
        if self.failure is not None:
            raise RuntimeError("another role failed")

    def _copy(
        self, source: Any, corner: list[Any], barrier: Barrier, target: Shared, pred: Any = True
    ) -> None:
        if not pred:
            return
        target.memory.fill_(unwritten(target.memory.dtype))
        self.copies.put((source, [int(c) for c in corner], barrier, target))

    def _prefetch(self, assembly: str, _constraints: str, args: Any, **_options: object) -> None:
        """In kernels here, assembly only waits and prefetches; spans must be in the tensor."""
        if "bulk.prefetch" not in assembly:
            return
        pointer, sizes = args
        for offset, size in zip(pointer.offset.tolist(), sizes.tolist(), strict=True):
            values = torch.arange(size // pointer.memory.element_size())
            assert size % 16 == 0 and offset * pointer.memory.element_size() % 16 == 0
            Pointer(pointer.memory, offset + values).places(None)
            self.fetched.append((offset, len(values)))

    def _copy_rows(self, target: Shared, source: Pointer, mask: Tensor) -> None:
        """A warp copies the values at pointers [rows, columns]; those masked are NaN, not zero."""
        target.memory.fill_(float("nan"))
        at, inside = source.places(mask)
        self.copies.put(lambda: target.put(torch.where(inside, source.memory[at], float("nan"))))

    def _arrive_after_rows(self, barrier: Barrier, increment_count: bool) -> None:
        """Each thread of a warp arrives when its copies have."""
        assert not increment_count
        self.copies.put(lambda: self._change(barrier, 32, 0))

    def _copy_engine(self) -> None:
        while (work := self.copies.get()) is not None:
            time.sleep(0)
            if callable(work):
                work()
                continue
            source, corner, barrier, target = work
            box = torch.zeros(source.block_shape, dtype=source.base.dtype)
            inside = [
                max(0, min(size, whole - at))
                for size, whole, at in zip(source.block_shape, source.shape, corner, strict=True)
            ]
            part = tuple(slice(0, size) for size in inside)
            whole = source.base.as_strided(source.shape, source.strides)
            box[part] = whole[
                tuple(slice(at, at + size) for at, size in zip(corner, inside, strict=True))
            ]
            target.put(box)
            self._change(barrier, 0, -size_of(box.dtype) * box.numel())

    def _multiply(
        self, a: Any, b: Any, acc: Any, use_acc: bool = True, is_async: bool = False
    ) -> Any:
        result: dict[str, Tensor] = {}

        def compute() -> None:
            left = a if isinstance(a, Tensor) else a.load(None)
            product = left.float() @ b.load(None).float()
            before = acc if isinstance(acc, Tensor) else acc["value"]
            result["value"] = before + product if use_acc else product

        if not is_async:
            compute()
            return result["value"]
        self.products.__dict__.setdefault("pending", []).append(compute)
        return result

    def _wait_products(self, outstanding: int, deps: list[Any]) -> Any:
        """The sums that are computed by then; one that is not can only be added to."""
        pending = self.products.__dict__.setdefault("pending", [])
        time.sleep(0.001)  # products read their operands late
        while len(pending) > outstanding:
            pending.pop(0)()
        done = [dep.get("value", dep) if isinstance(dep, dict) else dep for dep in deps]
        return done[0] if len(done) == 1 else done

    def _warp_specialize(self, roles: Any, _warps: object, _registers: object) -> None:
        def run(function: Any, arguments: Any) -> None:
            try:
                function(*arguments)
            except BaseException as error:  # it is raised again by the thread that started all
                with self.changed:
                    self.failure = self.failure or error
                    self.changed.notify_all()

        engine = threading.Thread(target=self._copy_engine)
        threads = [threading.Thread(target=run, args=role) for role in roles]
        for thread in (engine, *threads):
            thread.start()
        for thread in threads:
            thread.join()
        self.copies.put(None)
        engine.join()
        if self.failure is not None:
            raise self.failure


def _as_python(
    kernel: JITFunction[Any], machine: Machine, functions: dict[int, FunctionType]
) -> FunctionType:
    """The function of a kernel, or of a part of one, that calls `machine`."""
    if id(kernel) not in functions:
        names: dict[str, Any] = {}
        functions[id(kernel)] = FunctionType(kernel.fn.__code__, names, kernel.fn.__name__)
        for name, value in kernel.fn.__globals__.items():
            if isinstance(value, JITFunction):
                value = _as_python(value, machine, functions)
            names[name] = value.value if isinstance(value, constexpr) else value
        names |= machine.names
    return functions[id(kernel)]


class ThreadedKernel:
    """In place of a kernel of `module`: `kernel[grid](...)` runs its programs one after another, or
    at the same time if they meet: then `meet` is the name of the function in which they do.

    `parts` are functions that take the place of those of their names, which use registers.
    """

    def __init__(self, module: Any, kernel: str, meet: str | None = None, **parts: Any) -> None:
        self._module, self._kernel, self._parts, self._meet = module, kernel, parts, meet

    def __getitem__(self, grid: tuple[int]) -> Any:
        programs, run_one = range(grid[0]), self._run
        if self._meet is None:
            return lambda *args, **options: [run_one(p, grid[0], args, options) for p in programs]
        meeting = threading.Barrier(grid[0], timeout=TIMEOUT)
        self._parts[self._meet] = lambda *_: meeting.wait() * 0

        def run_all(*args: Any, **options: Any) -> None:
            def run(program: int) -> None:
                try:
                    run_one(program, grid[0], args, options)
                except BaseException:
                    meeting.abort()  # so that the others end, too
                    raise

            with ThreadPoolExecutor(grid[0]) as pool:
                list(pool.map(run, programs))

        return run_all

    def _run(self, program: int, num_programs: int, args: Any, options: dict[str, Any]) -> None:
        machine = Machine(program, num_programs)
        machine.names |= self._parts
        functions: dict[int, FunctionType] = {}
        options = {k: v for k, v in options.items() if k not in ("num_warps", "maxnreg")}
        of_torch = {"fp16": torch.float16, "bf16": torch.bfloat16}
        options = {k: of_torch.get(str(v), v) for k, v in options.items()}
        args = [Pointer(a) if isinstance(a, Tensor) else a for a in args]
        options = {k: Pointer(v) if isinstance(v, Tensor) else v for k, v in options.items()}
        _as_python(self._original, machine, functions)(*args, **options)

    def replace(self, monkeypatch: Any) -> None:
        """Take the place of the kernel in its module."""
        self._original = getattr(self._module, self._kernel)
        monkeypatch.setattr(self._module, self._kernel, self)
