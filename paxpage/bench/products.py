"""The matrix products of a compiled function, found in its HLO text, and what each costs at the least."""

import math
import re
from typing import NamedTuple

from paxpage.bench.plots import Roof

ARRAY = re.compile(r"(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<op>[\w\-]+)\((?P<operands>[^)]*)\)(?P<rest>.*)$"
)
COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
CALLED = re.compile(r"\bcalls=%?([\w.\-]+)")
LIBRARY_TARGET = re.compile(r'custom_call_target="[^"]*(?:cublas|gemm|matmul)[^"]*"')
CONTRACTED = re.compile(r'lhs_contracting_dim(?:ension)?s"?[=:][{\[]"?(\d+)')  # of a dot, of a library's call
BITS = re.compile(r"\d+")


class Product(NamedTuple):
    """One matrix product: bytes of its operands and its output, and operations."""

    name: str  # of the instruction that becomes a kernel: the product itself, or the fusion around it
    num_bytes: int
    num_flops: float
    is_library: bool  # a call of cuBLAS, whose kernels have names of their own

    def floor_s(self, roof: Roof) -> float:
        """Seconds that it takes at the least."""
        return max(self.num_bytes / roof.bytes_per_s, self.num_flops / roof.flops_per_s)


class _Array(NamedTuple):
    sizes: tuple[int, ...]
    num_bytes: int


class _Instruction(NamedTuple):
    name: str
    computation: str
    array: _Array
    op: str
    operands: list[str]
    rest: str


def products(hlo_text: str) -> list[Product]:
    """In the order in which the compiler has scheduled them."""
    instructions = _read(hlo_text)
    by_name = {instruction.name: instruction for instruction in instructions}
    dots = {i.computation: i for i in instructions if i.op == "dot"}
    found = []
    for instruction in instructions:
        called = CALLED.search(instruction.rest)
        inner = dots.get(called.group(1)) if called and instruction.op == "fusion" else None
        is_library = instruction.op == "custom-call" and LIBRARY_TARGET.search(instruction.rest) is not None
        if inner or is_library or instruction.op == "dot":
            found.append(_product(instruction.name, inner or instruction, by_name, is_library))
    return found


def _product(name: str, product: _Instruction, by_name: dict[str, _Instruction], is_library: bool) -> Product:
    left, right = (by_name[operand].array for operand in product.operands[:2])
    contracted = CONTRACTED.search(product.rest)
    assert contracted is not None, f"the matrix product {product.name} names no contracted dimension"
    num_flops = 2.0 * math.prod(product.array.sizes) * left.sizes[int(contracted.group(1))]
    return Product(name, left.num_bytes + right.num_bytes + product.array.num_bytes, num_flops, is_library)


def _read(hlo_text: str) -> list[_Instruction]:
    computation, found = "", []
    for line in hlo_text.splitlines():
        if head := COMPUTATION.match(line):
            computation = head.group(1)
        elif match := INSTRUCTION.match(line):
            operands = [part.split()[-1].lstrip("%") for part in match["operands"].split(",") if part.strip()]
            array = _first_array(match["type"])
            found.append(_Instruction(match["name"], computation, array, match["op"], operands, match["rest"]))
    return found


def _first_array(type_text: str) -> _Array:
    """Of a tuple the first, which for a library's call is the product; the others are its workspace."""
    match = ARRAY.search(type_text)
    if match is None:
        return _Array((), 0)
    sizes = tuple(int(size) for size in match.group(2).split(",") if size)
    bits = BITS.search(match.group(1))
    return _Array(sizes, math.prod(sizes) * (int(bits.group()) if bits else 8) // 8)
