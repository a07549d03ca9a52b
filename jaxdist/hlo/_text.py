"""Parses HLO text into computations of instructions.

# Note [Starts of asynchronous operations]
An asynchronous operation is written as a start and a done, and some have updates in between. The
start has the operands and the attributes of the operation. Its result is a tuple whose layout
depends on the operation and on the version of XLA. `resolve_start` returns the operation itself,
with its own results, so other readers need no rule for starts. They skip `-update` and `-done`.
"""

import dataclasses
import fractions
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence

from jaxdist import _compat

_COMMENT = re.compile(r"/\*.*?\*/")
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.-]+)(?: \(.*\) -> .*)? \{\s*$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<rest>.*)$")
_OPCODE = re.compile(r"(?P<opcode>[a-z][\w-]*)\(")
_CALLED = re.compile(
    r"(?P<how>calls|to_apply|body|condition|branch_computations|true_computation|"
    r"false_computation|called_computations)=(?:\{(?P<many>[^}]*)\}|%?(?P<one>[\w.-]+))"
)
_ARRAY = re.compile(r"(?P<dtype>pred|token|opaque|[a-z]+\d+[a-z0-9]*)\[[\d,<=]*\]")
_DIMS = re.compile(r"\[([\d,<=]*)\]")
_NUMBERED = re.compile(r"^(?P<number>\d+) (?P<what>.*)$")
_FIELD = re.compile(r"(\w+)=(\d+)")
_METADATA = re.compile(r"metadata=\{(?P<inside>(?:[^{}\"]|\"(?:[^\"\\]|\\.)*\")*)\}")
_QUOTED = re.compile(r'(?P<key>\w+)="(?P<value>(?:[^"\\]|\\.)*)"')
# The search for the line of a user ends here. The file has no operations, so what calls it did not
# request one. It is in a higher room; the constant makes a text that another process has compiled
# read the same, whether or not that room was imported.
_COMPILING_FILE = os.path.join(_compat.PACKAGE, "_program", "compile", "program.py")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")

# Dtypes whose names have no number of bits. Two 4-bit numbers share one byte.
_BITS = {"pred": 8, "token": 0, "opaque": 0}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str  # the attributes

    @property
    def called(self) -> Iterator[tuple[str, str]]:
        """The computations that it runs: the attribute, and the name."""
        for match in _CALLED.finditer(self.rest):
            for name in (match["many"] or match["one"]).split(","):
                yield match["how"], name.strip().lstrip("%")


@dataclasses.dataclass
class Module:
    """A program: its computations by name, and the tables of source lines."""

    header: str = ""
    entry: str = ""
    unread: list[str] = dataclasses.field(default_factory=list)  # lines of computations
    computations: dict[str, dict[str, Instruction]] = dataclasses.field(default_factory=dict)
    tables: dict[str, dict[int, str]] = dataclasses.field(
        default_factory=lambda: {name: dict[int, str]() for name in _TABLES}
    )

    @property
    def participants(self) -> int:
        """The number of devices that run the program."""
        counts = [
            int(n) for n in re.findall(r"(?:num_partitions|replica_count)=(\d+)", self.header)
        ]
        # A program with replicas and partitions runs on their product.
        return math.prod(counts)


def num_participants(text: str) -> int:
    """Return the number of devices that run a program, from its optimized HLO text.

    For several slices of TPUs, the text is that of the devices of one slice.

    Example:
        >>> from jaxdist import hlo
        >>> hlo.num_participants("HloModule jit_f, num_partitions=4")
        4
    """
    return Module(header=_header(text)).participants


def _header(text: str) -> str:
    """Return the first line, which has the numbers of replicas and partitions."""
    return next((line for line in text.splitlines() if line.startswith("HloModule")), "")


def read(text: str) -> Module:
    """Parse optimized HLO text."""
    module = Module(header=_header(text))
    table = ""
    # Instructions outside any computation go into the computation "", so single lines can be read.
    here: dict[str, Instruction] = module.computations.setdefault("", {})
    for line in _join_lines(text.splitlines()):
        if line in module.tables:
            table = line
        elif table and (row := _NUMBERED.match(line)):
            module.tables[table][int(row["number"])] = row["what"]
        elif line.startswith("}"):
            here = module.computations[""]
        elif computation := _COMPUTATION.match(line):
            table = ""
            here = module.computations.setdefault(computation["name"], {})
            if computation["entry"]:
                module.entry = computation["name"]
        elif instruction := _instruction(line):
            here[instruction.name] = instruction
        elif here is not module.computations[""] and line.strip():
            # See Note [Unknown instructions].
            module.unread.append(line.strip())
    return module


def _join_lines(lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a text, joining instructions that are written on several lines.

    The attributes of a kernel may have line breaks, and the last of its lines begins with `}`.
    """
    place = 0
    while place < len(lines):
        line, end = lines[place], place + 1
        if _INSTRUCTION.match(line) and (depth := _count_open(line)) > 0:
            # In a damaged text, an instruction must not swallow the next one.
            while depth > 0 and end < len(lines) and not _begins_another(lines[end]):
                depth += _count_open(lines[end])
                end += 1
            if depth == 0:
                line = " ".join(part.strip() for part in lines[place:end])
            else:
                end = place + 1
        yield line
        place = end


def _begins_another(line: str) -> bool:
    """Whether a line begins an instruction, or begins or ends a computation."""
    return bool(line == "}" or _INSTRUCTION.match(line) or _COMPUTATION.match(line))


def _count_open(line: str) -> int:
    """Return how many brackets of a line stay open, without those in strings."""
    bare = _STRING.sub("", line)
    return sum(map(bare.count, "([{")) - sum(map(bare.count, ")]}"))


def _instruction(line: str) -> Instruction | None:
    """Return the instruction of a line, or None."""
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    # XLA writes numbers as comments into long tuples: (f32[4], ..., /*index=5*/f32[4]).
    rest = _COMMENT.sub("", match["rest"])
    end = _closing(rest) if rest.startswith("(") else rest.find(" ") - 1
    shape, rest = rest[: end + 1], rest[end + 1 :].lstrip()
    opcode = _OPCODE.match(rest)
    if opcode is None:
        return None
    start = opcode.end() - 1
    end = _closing(rest[start:]) + start
    operands = tuple(
        part.split()[-1].lstrip("%") for part in _parts(rest[start + 1 : end]) if part.strip()
    )
    return Instruction(match["name"], shape, opcode["opcode"], operands, rest[end + 1 :])


def _closing(text: str) -> int:
    """Return the position of the bracket that closes the first one."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if depth == 0:
            return place
    return len(text) - 1


def _parts(text: str) -> Iterator[str]:
    """Yield the parts of a list, split at commas outside of all brackets."""
    depth = start = 0
    for place, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            yield text[start:place]
            start = place + 1
    yield text[start:]


def elements(shape: str) -> list[str]:
    """Return the elements of a tuple shape; for an array shape, the shape itself."""
    return [p.strip() for p in _parts(shape[1:-1])] if shape.startswith("(") else [shape]


# These starts do not start another operation, and their results have other layouts.
_OWN_STARTS = frozenset({"async-start", "copy-start"})
# Before JAX 0.12, only these starts return (operands, results, ...). The others return results.
_WITH_OPERANDS = frozenset({"all-gather", "collective-permute", "collective-broadcast"})


def resolve_start(i: Instruction) -> Instruction:
    """Return the operation that a start such as `fusion-start` starts, with its results.

    There are two notations. Since JAX 0.12, all starts return `((operands), results, numbers that
    the runtime waits on)`. In earlier versions, the result depends on the operation. See Note
    [Starts of asynchronous operations].

    Example:
        >>> new = Instruction("s", "((f32[8]), f32[2], u32[])", "reduce-scatter-start", ("x",), "")
        >>> resolve_start(new).opcode, resolve_start(new).shape
        ('reduce-scatter', 'f32[2]')
    """
    opcode = i.opcode.removesuffix("-start")
    if opcode == i.opcode or i.opcode in _OWN_STARTS:
        return i
    parts = elements(i.shape)
    has_operands = i.shape.startswith("(") and (
        parts[0].startswith("(") or opcode in _WITH_OPERANDS
    )
    shape = parts[1] if has_operands and len(parts) > 1 else i.shape
    return dataclasses.replace(i, opcode=opcode, shape=shape)


def num_bytes(shape: str) -> int:
    """Return the bytes of a shape; for a tuple, the sum."""
    return sum(
        math.ceil(math.prod(parse_dims(m[0])) * num_bits(m["dtype"]) / 8)
        for m in _ARRAY.finditer(shape)
    )


def parse_dims(shape: str) -> tuple[int, ...]:
    """Return the sizes of an array shape; for a tuple, those of the first array."""
    found = _DIMS.search(shape)
    # `<=4` is a dynamic size with its bound.
    return tuple(int(d.lstrip("<=")) for d in found[1].split(",") if d) if found else ()


def find_shape(within: Mapping[str, Instruction], name: str) -> str:
    """Return the shape of an operand, or "" if the text lacks it."""
    return within[name].shape if name in within else ""


def num_bits(dtype: str) -> int:
    """Return the bits of one number of a dtype such as `f8e4m3fn`."""
    number = re.search(r"\d+", dtype)
    return _BITS.get(dtype, int(number[0]) if number else 8)


def dtype(shape: str) -> str:
    """Return the dtype of an array shape; for a tuple, that of the first array; or ""."""
    found = _ARRAY.search(shape)
    return found["dtype"] if found else ""


def metadata(instruction: Instruction) -> dict[str, str]:
    """Return the metadata of an instruction: its name in JAX and its source line."""
    found = _METADATA.search(instruction.rest)
    inside = found["inside"] if found else ""
    # A quoted name may contain `axis=1`, for instance, which is not a field.
    numbers = _FIELD.findall(_QUOTED.sub("", inside))
    return {**{m["key"]: m["value"] for m in _QUOTED.finditer(inside)}, **dict(numbers)}


def find_part(conditional: Instruction) -> fractions.Fraction:
    """Return the part of the iterations in which a conditional has work; 1 where none is noted."""
    return _compat.find_part(metadata(conditional).get("op_name", ""))


def source(module: Module, noted: dict[str, str]) -> str:
    """Return `file:line (function)` of the user's line of an instruction, or ""."""
    for file, line, function in _frames(module, noted):
        if file == _COMPILING_FILE:
            break
        if not file.startswith(_compat.PACKAGE):
            return f"{file}:{line} ({function})" if function else f"{file}:{line}"
    return ""


def _frames(module: Module, noted: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield the calls that led to an instruction, the innermost first."""
    if "source_file" in noted:
        yield noted["source_file"], noted.get("source_line", "0"), ""
    frames, locations = module.tables["StackFrames"], module.tables["FileLocations"]
    number = int(noted.get("stack_frame_id", "0"))
    while number in frames:
        frame = dict(_FIELD.findall(frames[number]))
        place = dict(_FIELD.findall(locations.get(int(frame["file_location_id"]), "")))
        file = module.tables["FileNames"].get(int(place.get("file_name_id", "0")), "")
        function = module.tables["FunctionNames"].get(int(place.get("function_name_id", "0")), "")
        yield file.strip('"'), place.get("line", "0"), function.strip('"')
        # The text has the parent's number plus 1, or 1 for no parent. `min` ends the loop even if a
        # frame is its own parent.
        number = min(int(frame.get("parent_frame_id", "1")), number) - 1
