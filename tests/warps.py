"""Device functions of a straight line run on the CPU, all threads of some warps at once, in the bits of the reference.

A value is a tensor [threads]; shared memory is an array of bytes. ``ldmatrix`` and the others follow the PTX ISA's
pictures of fragments; they know nothing of the kernel's layouts.
"""

from types import SimpleNamespace

import torch

from reference.numerics import ieee, mufu, tensor_core
from reference.numerics.formats import to_bf16

LANES = 32


def ints(x, threads):
    return x.to(torch.int64) if isinstance(x, torch.Tensor) else torch.full((threads,), int(x), dtype=torch.int64)


def bits(x):
    """The 32-bit words of fp32 or integer values, as non-negative int64."""
    x = x.contiguous().view(torch.int32) if x.dtype == torch.float32 else x
    return x.to(torch.int64) & 0xFFFFFFFF


def to_float(words):
    return words.to(torch.int32).view(torch.float32) if words.dtype != torch.float32 else words


def signed(words):
    return torch.where(words >= 1 << 31, words - (1 << 32), words)


def select(condition, a, b):
    if isinstance(condition, bool):
        return a if condition else b
    if isinstance(a, torch.Tensor) and a.dtype == torch.float32:
        return torch.where(condition, a, b)
    return torch.where(condition, ints(a, len(condition)), ints(b, len(condition)))


class Warps:
    """``threads`` threads over shared memory of ``size`` bytes; ``ptx`` and ``arch`` stand in for the modules."""

    def __init__(self, threads, size):
        self.threads, self.memory = threads, torch.zeros(size, dtype=torch.uint8)
        self.conflicts = 0
        names = ("ld_b32", "ld_v2", "ld_v4", "st_b32", "st_v2", "st_v4", "st_b16", "ldmatrix_x4", "ldmatrix_x4_trans")
        names += ("stmatrix_x4_trans", "mma_sync", "cvt_bf16x2", "bf16_lo", "bf16_hi")
        self.ptx = SimpleNamespace(rsqrt_approx_ftz=mufu.rsqrt_approx_ftz, **{n: getattr(self, n) for n in names})
        nothing = SimpleNamespace(barrier=lambda **_: None, sync_warp=lambda: None)
        self.arch = SimpleNamespace(**vars(nothing), shuffle_sync=self.shuffle, shuffle_sync_bfly=self.butterfly)
        self.cute = SimpleNamespace(arch=self.arch)

    def part(self, first, stop):
        """Some of the threads on the same memory."""
        warps = Warps(stop - first, 0)
        warps.memory = self.memory
        return warps

    def install(self, patch, *modules):
        """Let the modules' device functions run here."""
        scalar = {"Float32": lambda x: torch.full((self.threads,), x), "Int32": lambda x: ints(x, self.threads)}
        rounding = {name: getattr(ieee, name) for name in ("add_rn", "sub_rn", "mul_rn", "fma_rn")}
        special = {name: getattr(mufu, name) for name in ("ex2_approx_ftz", "rcp_approx_ftz")}
        own = {"ptx": self.ptx, "cute": self.cute, "select_": select}
        for module in modules:
            for name, value in (scalar | rounding | special | own).items():
                if hasattr(module, name):
                    patch.setattr(module, name, value)

    # Registers.

    def shuffle(self, x, source):
        lane = torch.arange(self.threads)
        return x[lane // LANES * LANES + ints(source, self.threads) % LANES]

    def butterfly(self, x, offset):
        return x[torch.arange(self.threads) ^ offset]

    def cvt_bf16x2(self, lo, hi):
        lo, hi = (to_bf16(x).view(torch.int16).to(torch.int64) & 0xFFFF for x in (lo, hi))
        return lo | hi << 16

    def bf16_lo(self, word):
        return to_float(signed((word << 16) & 0xFFFFFFFF))

    def bf16_hi(self, word):
        return to_float(signed(word & 0xFFFF0000))

    def mma_sync(self, form, a, b, c):
        """m16n8k16 of bf16 into fp32."""
        assert form == "m16n8k16.row.col.f32.bf16.bf16.f32"
        lane = torch.arange(LANES)
        g, t = lane // 4, lane % 4
        warps = self.threads // LANES
        left, right, start = torch.zeros(warps, 16, 16), torch.zeros(warps, 8, 16), torch.zeros(warps, 16, 8)
        for half, of in enumerate((self.bf16_lo, self.bf16_hi)):
            for i, words in enumerate(a):
                left[:, g + i % 2 * 8, 2 * t + half + i // 2 * 8] = of(words).view(warps, LANES)
            for i, words in enumerate(b):
                right[:, g, 2 * t + half + i * 8] = of(words).view(warps, LANES)
        for i, values in enumerate(c):
            start[:, g + i // 2 * 8, 2 * t + i % 2] = values.view(warps, LANES)
        product = tensor_core.mma(to_bf16(left), to_bf16(right), start)
        return tuple(product[:, g + i // 2 * 8, 2 * t + i % 2].flatten() for i in range(4))

    # Shared memory.

    def _places(self, address, size):
        address = ints(address, self.threads)
        assert bool((address % size == 0).all()), "misaligned"
        assert bool(((address >= 0) & (address + size <= len(self.memory))).all()), "outside"
        return address[:, None] + torch.arange(size)

    def _store(self, address, words, size):
        places = self._places(address, size)
        values = torch.stack([bits(w) for w in words], 1)
        bytes_ = torch.stack([values >> shift & 0xFF for shift in (0, 8, 16, 24)], 2).flatten(1)[:, :size]
        self.memory[places.flatten()] = bytes_.flatten().to(torch.uint8)

    def _load(self, places):
        """32-bit words of [n, 4 k] bytes."""
        x = self.memory[places].to(torch.int64).unflatten(1, (-1, 4))
        return list((x * torch.tensor([1, 1 << 8, 1 << 16, 1 << 24])).sum(2).unbind(1))

    def _typed(self, words, kind):
        return words if kind is None else [to_float(signed(w)) for w in words]

    def ld_b32(self, space, address, kind=None):
        return self._typed(self._load(self._places(address, 4)), kind)[0]

    def ld_v2(self, space, address, kind=None):
        return tuple(self._typed(self._load(self._places(address, 8)), kind))

    def ld_v4(self, space, address, kind=None):
        return tuple(self._typed(self._load(self._places(address, 16)), kind))

    def st_b16(self, space, address, word):
        self._store(address, [word & 0xFFFF], 2)

    def st_b32(self, space, address, word):
        self._store(address, [word], 4)

    def st_v2(self, space, address, words):
        self._store(address, words, 8)

    def st_v4(self, space, address, words):
        self._store(address, words, 16)

    def _matrices(self, address):
        """[warps, 4, 8 rows, 8 columns]: the bytes' places, two for each element."""
        return self._places(address, 16).view(-1, 4, 8, 8, 2)

    def _pairs(self, places):
        """Fragments of matrices given as places [warps, 4, 8, 8, 2]: lane l has row l // 4, columns 2(l mod 4), + 1."""
        rows = places.reshape(-1, 4, 8, 4, 4).permute(1, 0, 2, 3, 4).reshape(4, self.threads, 4)
        return rows

    def ldmatrix_x4(self, address):
        return tuple(self._load(p)[0] for p in self._pairs(self._matrices(address)))

    def ldmatrix_x4_trans(self, address):
        return tuple(self._load(p)[0] for p in self._pairs(self._matrices(address).transpose(2, 3)))

    def stmatrix_x4_trans(self, address, words):
        for places, word in zip(self._pairs(self._matrices(address).transpose(2, 3)), words, strict=True):
            bytes_ = torch.stack([word >> shift & 0xFF for shift in (0, 8, 16, 24)], 1)
            self.memory[places.flatten()] = bytes_.flatten().to(torch.uint8)


def banks_of(address, size):
    """The largest number of different 4-byte words of one bank that a phase of an access by 32 lanes touches."""
    a_phase = LANES * 4 // size
    worst = 0
    for first in range(0, LANES, a_phase):
        words = {int(x) // 4 + i for x in address[first : first + a_phase] for i in range(max(1, size // 4))}
        count = [0] * 32
        for word in words:
            count[word % 32] += 1
        worst = max(worst, *count)
    return worst
