"""Vectors of 16 float32 for code that numba compiles: every operation is LLVM's own on `<16 x float>`.

They exist so that fast code needs no permission to reorder sums. Each operation is IEEE's, lane by lane, without
fast-math flags, and sums over lanes go by a fixed tree; so the numbers are the same on every processor, whatever the
width of its registers, and however often the code is compiled.

Numbers in memory are float32, or bfloat16 as its 16 bits. Which it is, is told by the type of an argument `like`:
`np.float32` or `np.uint16`. Addresses are integers, aligned to the numbers that are there.
"""

# Compiled code takes no names.
# ruff: noqa: PLR0917
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic as _numba_intrinsic
from numba.extending import models, register_model

LANES = 16
TILE_ROWS, TILE_COLUMNS = 6, 64

_f32, _i1, _i16, _i32 = ir.FloatType(), ir.IntType(1), ir.IntType(16), ir.IntType(32)
_floats, _words = ir.VectorType(_f32, LANES), ir.VectorType(_i32, LANES)
_halves, _mask = ir.VectorType(_i16, LANES), ir.VectorType(_i1, LANES)

# exp(r) - 1 - r over r², |r| ≤ ln 2 / 2, from the highest power on: Cephes' expf. ln 2 in two parts, the first short.
_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.44269502162933349609375, 0.693359375, -2.12194440e-4
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_LEAST = -87.0


def intrinsic(typed: Callable[..., Any]) -> Any:
    """An operation of compiled code; callers do not give the first argument."""
    return _numba_intrinsic(typed)


class Lanes(types.Type):
    """numba's type of a vector."""

    def __init__(self) -> None:
        super().__init__(name="Lanes")


_lanes = Lanes()


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _floats)


@intrinsic
def zeros(_: Any) -> Any:
    """Zero in every lane."""
    return _lanes(), lambda context, builder, signature, values: _same(0.0)


@intrinsic
def spread(_: Any, number: Any) -> Any:
    """`number` in every lane."""
    return _lanes(types.float32), lambda context, builder, signature, values: _splat(builder, values[0])


@intrinsic
def fma(_: Any, a: Any, b: Any, c: Any) -> Any:
    """a b + c, rounded once."""
    return _lanes(_lanes, _lanes, _lanes), lambda context, builder, signature, values: _fma(builder, *values)


@intrinsic
def add(_: Any, a: Any, b: Any) -> Any:
    """a + b."""
    return _lanes(_lanes, _lanes), lambda context, builder, signature, values: builder.fadd(*values)


@intrinsic
def times(_: Any, a: Any, factor: Any) -> Any:
    """Each lane times one number."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.fmul(values[0], _splat(builder, values[1]))

    return _lanes(_lanes, types.float32), generate


@intrinsic
def higher(_: Any, a: Any, b: Any) -> Any:
    """The higher of each two; `b` where one is not a number."""
    return _lanes(_lanes, _lanes), lambda context, builder, signature, values: _higher(builder, *values)


@intrinsic
def total(_: Any, a: Any) -> Any:
    """The sum of the lanes: halves onto each other until one is left."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _fold(builder, values[0], builder.fadd)

    return types.float32(_lanes), generate


@intrinsic
def highest(_: Any, a: Any) -> Any:
    """The highest of the lanes."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _fold(builder, values[0], lambda x, y: _higher(builder, x, y))

    return types.float32(_lanes), generate


@intrinsic
def exp(_: Any, a: Any) -> Any:
    """e to the power of lanes that are not above 0 by more than rounding, to two units of the last place.

    0 from -87 on down, NaN of NaN.
    """
    return _lanes(_lanes), lambda context, builder, signature, values: _exp(builder, *values)


@intrinsic
def load(_: Any, like: Any, address: Any) -> Any:
    """16 numbers from `address` on."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        half = signature.args[0] == types.uint16
        pointer = builder.inttoptr(values[1], (_halves if half else _floats).as_pointer())
        stored = builder.load(pointer, align=2 if half else 4)
        return _widen(builder, stored) if half else stored

    return _lanes(like, types.int64), generate


@intrinsic
def load_some(_: Any, like: Any, address: Any, count: Any, rest: Any) -> Any:
    """The first `count` < 16 numbers from `address` on, and `rest` in the other lanes; no more is read."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        half = signature.args[0] == types.uint16
        element = _i16 if half else _f32
        start = builder.inttoptr(values[1], element.as_pointer())
        found = cgutils.alloca_once_value(builder, _splat(builder, values[3]))
        lane_of = builder.bitcast(found, _f32.as_pointer())
        with cgutils.for_range(builder, values[2]) as loop:
            stored = builder.load(builder.gep(start, [loop.index]), align=2 if half else 4)
            if half:
                stored = builder.bitcast(builder.shl(builder.zext(stored, _i32), _i32(16)), _f32)
            builder.store(stored, builder.gep(lane_of, [loop.index]))
        return builder.load(found)

    return _lanes(like, types.int64, types.int64, types.float32), generate


@intrinsic
def rounded(_: Any, like: Any, a: Any) -> Any:
    """As it would be loaded after it was stored."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        half = signature.args[0] == types.uint16
        return _widen(builder, _narrow(builder, values[1])) if half else values[1]

    return _lanes(like, _lanes), generate


@intrinsic
def multiply(_: Any, a: Any, b: Any) -> Any:
    """a b."""
    return _lanes(_lanes, _lanes), lambda context, builder, signature, values: builder.fmul(*values)


@intrinsic
def store(_: Any, like: Any, address: Any, a: Any) -> Any:
    """16 numbers to `address` and on; bfloat16 rounds to nearest, ties to even."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        half = signature.args[0] == types.uint16
        pointer = builder.inttoptr(values[1], (_halves if half else _floats).as_pointer())
        builder.store(_narrow(builder, values[2]) if half else values[2], pointer, align=2 if half else 4)
        return context.get_dummy_value()

    return types.none(like, types.int64, _lanes), generate


@intrinsic
def store_some(_: Any, like: Any, address: Any, a: Any, count: Any) -> Any:
    """The first `count` < 16 of them; no more is written."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        half = signature.args[0] == types.uint16
        element = _i16 if half else _f32
        target = builder.inttoptr(values[1], element.as_pointer())
        kept = cgutils.alloca_once_value(builder, _narrow(builder, values[2]) if half else values[2])
        lane_of = builder.bitcast(kept, element.as_pointer())
        with cgutils.for_range(builder, values[3]) as loop:
            stored = builder.load(builder.gep(lane_of, [loop.index]))
            builder.store(stored, builder.gep(target, [loop.index]), align=2 if half else 4)
        return context.get_dummy_value()

    return types.none(like, types.int64, _lanes, types.int64), generate


@intrinsic
def copy_bytes(_: Any, source: Any, target: Any, count: Any) -> Any:
    """`count` bytes from one address to another, which do not overlap."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        start, end = (builder.inttoptr(value, ir.IntType(8).as_pointer()) for value in values[:2])
        cgutils.raw_memcpy(builder, end, start, values[2], 1)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.int64), generate


@intrinsic
def zero_bytes(_: Any, target: Any, count: Any) -> Any:
    """`count` bytes of zero."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        cgutils.memset(builder, builder.inttoptr(values[0], ir.IntType(8).as_pointer()), values[1], 0)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), generate


@intrinsic
def load_float(_: Any, address: Any) -> Any:
    """One float32."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load(builder.inttoptr(values[0], _f32.as_pointer()), align=4)

    return types.float32(types.int64), generate


@intrinsic
def store_float(_: Any, address: Any, number: Any) -> Any:
    """One float32."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        builder.store(values[1], builder.inttoptr(values[0], _f32.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.none(types.int64, types.float32), generate


def _same(number: float) -> Any:
    return ir.Constant(_floats, [_f32(number)] * LANES)


def _splat(builder: Any, number: Any) -> Any:
    first = builder.insert_element(ir.Constant(_floats, ir.Undefined), number, _i32(0))
    return builder.shuffle_vector(first, ir.Constant(_floats, ir.Undefined), ir.Constant(_words, [_i32(0)] * LANES))


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    kind = ir.FunctionType(_floats, [_floats] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v16f32"), [a, b, c])


def _higher(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _fold(builder: Any, vector: Any, join: Any) -> Any:
    width = LANES
    while width > 1:
        width //= 2
        kind = ir.VectorType(_i32, width)
        low, high = ([_i32(start + lane) for lane in range(width)] for start in (0, width))
        undefined = ir.Constant(vector.type, ir.Undefined)
        vector = join(
            builder.shuffle_vector(vector, undefined, ir.Constant(kind, low)),
            builder.shuffle_vector(vector, undefined, ir.Constant(kind, high)),
        )
    return builder.extract_element(vector, _i32(0))


def _exp(builder: Any, x: Any) -> Any:
    """2ⁿ times a polynomial of the remainder."""
    normal = builder.fcmp_ordered(">", x, _same(_LEAST))
    known = builder.select(normal, x, _same(_LEAST))
    # Towards zero from half below: the nearest whole number.
    n = builder.fptosi(_fma(builder, known, _same(_LOG2_E), _same(-0.5)), _words)
    whole = builder.sitofp(n, _floats)
    r = _fma(builder, whole, _same(-_LN2_LOW), _fma(builder, whole, _same(-_LN2_HIGH), known))
    p = _same(_EXP[0])
    for factor in _EXP[1:]:
        p = _fma(builder, p, r, _same(factor))
    y = builder.fadd(_fma(builder, builder.fmul(r, r), p, r), _same(1.0))
    power = builder.shl(builder.add(n, _same_word(127)), _same_word(23))
    least = builder.select(builder.fcmp_unordered("uno", x, x), x, _same(0.0))
    return builder.select(normal, builder.fmul(y, builder.bitcast(power, _floats)), least)


def _same_word(number: int) -> Any:
    return ir.Constant(_words, [_i32(number)] * LANES)


def _widen(builder: Any, stored: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(stored, _words), _same_word(16)), _floats)


def _narrow(builder: Any, numbers: Any) -> Any:
    bits = builder.bitcast(numbers, _words)
    odd = builder.and_(builder.lshr(bits, _same_word(16)), _same_word(1))
    rounded = builder.lshr(builder.add(builder.add(bits, _same_word(0x7FFF)), odd), _same_word(16))
    is_none = builder.fcmp_unordered("uno", numbers, numbers)
    return builder.trunc(builder.select(is_none, _same_word(0x7FC0), rounded), _halves)


class _BFloat(ir.Type):
    """bfloat16, which llvmlite has no type for."""

    def _to_string(self) -> str:
        return "bfloat"


_pairs = ir.VectorType(_BFloat(), 2 * LANES)


@intrinsic
def tile(_: Any, a: Any, a_stride: Any, b: Any, pairs: Any, c: Any, c_stride: Any, add_to: Any) -> Any:
    """C = A B, or C + A B if `add_to`, of `TILE_ROWS` rows and `TILE_COLUMNS` columns, by AVX512-BF16's instruction.

    A is bfloat16, its rows `a_stride` bytes apart; B is `pairs` rows of words, each two numbers of a column, one below
    the other; C is float32, its rows `c_stride` bytes apart. One order of sums for each number of C: pair after pair.
    """
    wide = types.int64

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        _tile(builder, *values)
        return context.get_dummy_value()

    return types.none(wide, wide, wide, wide, wide, wide, wide), generate


def _tile(builder: Any, a: Any, a_stride: Any, b: Any, pairs: Any, c: Any, c_stride: Any, add_to: Any) -> None:
    i64, columns = ir.IntType(64), range(TILE_COLUMNS // LANES)

    def vector_at(start: Any, kind: Any, nbytes: int) -> Any:
        return builder.inttoptr(builder.add(start, i64(nbytes)), kind.as_pointer())

    c_rows = [builder.add(c, builder.mul(c_stride, i64(row))) for row in range(TILE_ROWS)]
    a_rows = [builder.add(a, builder.mul(a_stride, i64(row))) for row in range(TILE_ROWS)]
    sums = [[cgutils.alloca_once_value(builder, _same(0.0)) for _ in columns] for _ in c_rows]
    with builder.if_then(builder.icmp_signed("!=", add_to, i64(0))):
        for start, row in zip(c_rows, sums, strict=True):
            for column in columns:
                before = builder.load(vector_at(start, _floats, 4 * LANES * column), align=4)
                builder.store(before, row[column])
    kind = ir.FunctionType(_floats, [_floats, _pairs, _pairs])
    product = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
    with cgutils.for_range(builder, pairs) as loop:
        at = builder.add(b, builder.mul(loop.index, i64(4 * TILE_COLUMNS)))
        right = [builder.load(vector_at(at, _words, 4 * LANES * column), align=4) for column in columns]
        right = [builder.bitcast(one, _pairs) for one in right]
        for start, row in zip(a_rows, sums, strict=True):
            word = builder.inttoptr(builder.add(start, builder.mul(loop.index, i64(4))), _i32.as_pointer())
            first = builder.insert_element(ir.Constant(_words, ir.Undefined), builder.load(word, align=4), _i32(0))
            left = builder.shuffle_vector(first, ir.Constant(_words, ir.Undefined), _same_word(0))
            left = builder.bitcast(left, _pairs)
            for column in columns:
                builder.store(builder.call(product, [builder.load(row[column]), left, right[column]]), row[column])
    for start, row in zip(c_rows, sums, strict=True):
        for column in columns:
            builder.store(builder.load(row[column]), vector_at(start, _floats, 4 * LANES * column), align=4)
