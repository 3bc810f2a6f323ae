"""A function of HIVM's text as a Python function that counts.

Each SSA value becomes a variable, each operation that is counted a ``Count`` in its block.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autotune.offline.hivm_slice import Assign, Branch, Count, Loop, Step, python_of
from autotune.offline.hivm_values import SCOPE, CannotFollowError, State

_BYTES = {"f32": 4, "i32": 4, "bf16": 2, "f16": 2, "i16": 2, "i8": 1, "i1": 1, "i64": 8, "f64": 8}
_SYNCS = ("set_flag", "wait_flag", "pipe_barrier", "sync_block_set", "sync_block_wait")
_FREE = (
    "pointer_cast",
    "set_mask_norm",
    "set_ffts_base_addr",
    "get_block_idx",
    "get_sub_block_idx",
)
_TYPE = re.compile(  # shape, element type, address space
    r"memref<((?:[\d?]+x)*)(\w+)(?:, strided<[^>]*>)?(?:, #hivm\.address_space<(\w+)>)?>"
)
_OPERANDS = re.compile(r"(ins|outs)\(([^:]*) : ((?:[^()]|\([^()]*\))*)\)")
_INFIX = {
    "addi": "+",
    "subi": "-",
    "muli": "*",
    "andi": "&",
    "ori": "|",
    "xori": "^",
    "shli": "<<",
    "shrsi": ">>",
    "shrui": ">>",
    "floordivsi": "//",
}
_CALLS = {
    "divsi": "quotient",
    "divui": "quotient",
    "remsi": "remainder",
    "remui": "remainder",
    "ceildivsi": "ceil",
    "minsi": "least",
    "minui": "least",
    "maxsi": "most",
    "maxui": "most",
}

_UNSIGNED = ("shrui", "divui", "remui", "minui", "maxui")


@dataclasses.dataclass(frozen=True)
class Op:
    """One counted operation: its name, its pipe, and what one element of it weighs."""

    name: str
    pipe: str  # of PIPES, or "sync"
    elements: int | None  # of each execution; None where that varies
    itemsize: int
    kinds: tuple[str, ...] = ()  # element types of its operands


@dataclasses.dataclass(frozen=True)
class Translated:
    """One device function: its name, its core, what is counted in it, and what runs it.

    ``run(given, times, elements, program, sub_block, state)`` adds to the lists ``times``, one
    place a block, and ``elements``, one place an operation.
    """

    name: str
    core: str  # "aic" (cube) or "aiv" (vector)
    pipelined: bool  # cube and vector parts of several steps overlap through a workspace
    ops: tuple[Op, ...]
    block_of: tuple[int, ...]  # of each operation
    blocks: int
    run: Callable[[Sequence[Any], list[int], list[Any], int, int, State], None]
    arguments: int
    # What loops counted, by the integers that they read; the same for all programs.
    kept: dict[Any, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)


class Translator:
    """Writes one function as Python: each SSA value is a variable, each counted op a counter.

    A memref is two variables: (flat integers or None, offset), and the number of its elements,
    whose name ends in ``_size``.
    """

    def __init__(self, maps: Mapping[str, str], head: str, body: Sequence[str]) -> None:
        self.maps = {name: _affine(text) for name, text in maps.items()}
        self.head = head
        self.body = body
        self.ops: list[Op] = []
        self.steps: list[Step] = []
        # Open blocks: the loop or branch, the names that yield sets, a loop's results, and the
        # steps that it stands in.
        self.blocks: list[tuple[Loop | Branch, list[str], list[str], list[Step]]] = []

    def translated(self) -> Translated:
        name = re.search(r"@(\w+)\(", self.head)
        arguments = re.findall(r"(%arg\d+): ", self.head)
        assert name is not None, self.head[:80]
        core = "aic" if "func_core_type<AIC>" in self.head else "aiv"
        for i, argument in enumerate(arguments):
            is_memref = re.search(re.escape(argument) + r": memref", self.head) is not None
            self.set(_name(argument), f"(given[{i}], 0)" if is_memref else f"number(given[{i}])")
            if is_memref:
                self.set(_size(_name(argument)), "0")
        for text in _distinct([self.head, *self.body])[1:]:
            if text == "return" or text.startswith("return "):
                break
            if text and not text.startswith("//"):
                self.statement(text)
        source, block_of, blocks = python_of(self.steps, len(self.ops))
        scope = dict(SCOPE)
        exec(compile(source, f"<{name.group(1)}>", "exec"), scope)
        pipelined = any("multibuffer_unroll_factor" in line for line in self.body)
        return Translated(
            name.group(1),
            core,
            pipelined,
            tuple(self.ops),
            tuple(block_of),
            blocks,
            scope["run"],
            len(arguments),
        )

    def set(self, name: str, value: str) -> None:
        self.steps.append(Assign(((name, value),)))

    def statement(self, text: str) -> None:
        if text.startswith("}"):
            self.close(text)
            return
        results, operation = _results(text)
        kind = operation.split("(")[0].split("[")[0].split(" ")[0].split("<")[0]
        if kind == "scf.for":
            self.open_for(results, operation)
        elif kind == "scf.if":
            self.open_if(results, operation)
        elif kind == "scf.yield":
            names = re.findall(r"%[\w#-]+", operation.split(" : ")[0])
            self.assign(self.blocks[-1][1], [_name(n) for n in names])
        elif kind.startswith("hivm.hir."):
            self.hivm(results, kind.removeprefix("hivm.hir."), operation)
        elif kind.startswith("memref."):
            self.memref(results, kind.removeprefix("memref."), operation)
        elif kind.startswith(("arith.", "math.", "affine.")):
            self.set(_name(results[0]), self.scalar(kind, operation))
            if kind == "arith.select" and "memref" in operation:
                size = _elements(_TYPE.findall(operation)[-1][0])
                condition, a, b = (_name(n) for n in re.findall(r"%[\w#-]+", operation))
                chosen = f"choose({condition}, {_size(a)}, {_size(b)})"
                self.set(_size(_name(results[0])), chosen if size is None else str(size))
        else:
            raise CannotFollowError(f"unknown operation {kind}")

    # ---- blocks ----

    def assign(self, targets: Sequence[str], values: Sequence[str]) -> None:
        if targets:
            pairs = list(zip(targets, values, strict=True))
            sizes = [(_size(target), _size(value)) for target, value in pairs]
            self.steps.append(Assign((*pairs, *sizes)))

    def open_for(self, results: list[str], text: str) -> None:
        head = re.match(r"scf\.for (%\w+) = (%[\w#-]+) to (%[\w#-]+) step (%[\w#-]+)", text)
        if head is None:
            raise CannotFollowError(f"unknown loop {text[:80]}")
        carried = re.search(r"iter_args\((.*?)\) ->", text)
        pairs = re.findall(r"(%\w+) = (%[\w#-]+)", carried.group(1)) if carried else []
        state = [_name(inner) for inner, _ in pairs]
        self.assign(state, [_name(outer) for _, outer in pairs])
        first, last, step = (_name(head.group(i)) for i in (2, 3, 4))
        loop = Loop(_name(head.group(1)), (first, last, step))
        self.steps.append(loop)
        self.blocks.append((loop, state, [_name(r) for r in results], self.steps))
        self.steps = loop.body

    def open_if(self, results: list[str], text: str) -> None:
        condition = re.match(r"scf\.if (%[\w#-]+)", text)
        if condition is None:
            raise CannotFollowError(f"unknown branch {text[:80]}")
        branch = Branch(_name(condition.group(1)))
        self.steps.append(branch)
        self.blocks.append((branch, [_name(r) for r in results], [], self.steps))
        self.steps = branch.then

    def close(self, text: str) -> None:
        if not self.blocks:  # of the function or the module
            return
        block, state, results, outside = self.blocks[-1]
        if isinstance(block, Branch) and "else" in text:
            self.steps = block.other
            return
        self.blocks.pop()
        self.steps = outside
        self.assign(results, state[: len(results)])

    # ---- scalars ----

    def scalar(self, kind: str, text: str) -> str:
        if kind == "arith.constant":
            return _constant(text)
        if kind in ("affine.apply", "affine.min", "affine.max"):
            which = re.search(r"(#map\d*)", text)
            assert which is not None, text
            operands = [_name(n) for n in re.findall(r"%[\w#-]+", text.split(which.group(1), 1)[1])]
            names, expressions = self.maps[which.group(1)]
            bound = dict(zip(names, operands, strict=True))
            done = [re.sub(r"[ds]\d+", lambda m: bound[m.group(0)], e) for e in expressions]
            joined = ", ".join(done)
            return {"apply": joined, "min": f"least(state, {joined})", "max": f"most({joined})"}[
                kind[7:]
            ]
        operands = [_name(n) for n in re.findall(r"%[\w#-]+", text)]
        name = kind.split(".")[1]
        predicate = text.split()[1].rstrip(",") if name == "cmpi" else ""
        if name in _UNSIGNED or predicate.startswith("u"):
            operands = [f"unsigned({operand})" for operand in operands]
        if name == "cmpi":
            sign = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}[
                predicate.lstrip("su")
            ]
            return f"({operands[0]} {sign} {operands[1]})"
        if name == "select":
            return f"choose({', '.join(operands)})"
        if name == "extsi" and " i1 to " in text:
            return f"-number({operands[0]})"
        if name in ("extsi", "extui", "index_castui"):
            given = f"unsigned({operands[0]})" if name != "extsi" else operands[0]
            return f"number({given})"
        if name in ("trunci", "index_cast"):
            bits = re.search(r" to i(\d+)$", text)
            if bits is None:
                return f"number({operands[0]})"
            return (
                f"wrapped(number({operands[0]}), {bits.group(1)})"
                if bits.group(1) != "1"
                else (f"(number({operands[0]}) & 1)")
            )
        if name in _INFIX:
            return f"({operands[0]} {_INFIX[name]} {operands[1]})"
        if name in _CALLS:
            first = "state, " if _CALLS[name] == "least" else ""
            return f"{_CALLS[name]}({first}{operands[0]}, {operands[1]})"
        return "UNKNOWN"  # floating point

    # ---- memory ----

    def memref(self, results: list[str], name: str, text: str) -> None:
        if name in ("load", "store"):
            where = re.search(r"(%[\w#-]+)\[(.*?)\]", text)
            kinds = _TYPE.findall(text)
            assert where is not None, text
            assert kinds, text
            if name == "load":
                index = where.group(2)
                flat = index.count("%") == 1 and kinds[-1][2] == "gm"
                value = f"load({_name(where.group(1))}, {_name(index)})" if flat else "UNKNOWN"
                self.set(_name(results[0]), value)
            self.count(Op(f"memref.{name}", "S", 1, _BYTES.get(kinds[-1][1], 4), (kinds[-1][2],)))
            return
        target = _name(results[0])
        source = re.search(rf"memref\.{name} (%[\w#-]+)", text)
        static = _elements(_TYPE.findall(text)[-1][0])
        if name == "extract_strided_metadata":
            assert source is not None, text
            self.set(target, _name(source.group(1)))
            self.set(_size(target), _size(_name(source.group(1))))
            for number in results[1:]:  # offset, sizes and strides, of a buffer of the core
                self.set(_name(number), "UNKNOWN")
            return
        if name == "alloc":
            self.set(target, "(None, 0)")
            self.set(_size(target), str(static or 0))
            return
        assert source is not None, text
        base = _name(source.group(1))
        size = str(static) if static is not None else _size(base)
        place = base
        if name == "reinterpret_cast":
            parts = re.search(r"offset: \[(.*?)\], sizes: \[(.*?)\]", text)
            assert parts is not None, text
            if static is None:
                size = f"product(({_numbers(parts.group(2))},))"
            place = f"at({base}, {_numbers(parts.group(1))})"
        if name == "subview":
            lists = re.search(r"\[(.*?)\] \[(.*?)\] \[(.*?)\]", text)
            assert lists is not None, text
            if static is None:
                size = f"product(({_numbers(lists.group(2))},))"
            single = lists.group(1) if "," not in lists.group(1) else "0"
            place = f"at({base}, {_numbers(single)})"
        self.set(target, place)
        self.set(_size(target), size)

    # ---- what is counted ----

    def count(self, op: Op, elements: str = "") -> None:
        self.steps.append(Count(len(self.ops), elements if op.elements is None else ""))
        self.ops.append(op)

    def hivm(self, results: list[str], name: str, text: str) -> None:
        if name == "get_block_idx":
            self.set(_name(results[0]), "program")
        elif name == "get_sub_block_idx":
            self.set(_name(results[0]), "sub_block")
        elif name == "pointer_cast":
            self.set(_name(results[0]), "(None, 0)")
            elements = _elements(_TYPE.findall(text)[-1][0]) or 0
            self.set(_size(_name(results[0])), str(elements))
        elif name == "bitcast" and results:  # the same memory by another type
            source = re.search(r"bitcast (%[\w#-]+)", text)
            assert source is not None, text
            target, base = _name(results[0]), _name(source.group(1))
            self.set(target, base)
            self.set(_size(target), _size(base))
        elif name in _FREE:
            return
        elif name in _SYNCS:
            self.count(Op(name, "sync", 1, 0))
        else:
            self.counted(name, text)

    def counted(self, name: str, text: str) -> None:
        groups = {
            side: (re.findall(r"%[\w#-]+", names), _TYPE.findall(types))
            for side, names, types in _OPERANDS.findall(text)
        }
        ins, outs = groups.get("ins", ([], [])), groups.get("outs", ([], []))
        kinds = tuple(t[1] for t in [*ins[1], *outs[1]])
        if name.startswith("mmad"):
            m, k, n = (_name(v) for v in ins[0][3:6])
            self.count(Op(name, "M", None, _BYTES.get(kinds[0], 2), kinds), f"{m} * {k} * {n}")
            return
        pipe = {"load": "MTE2", "nd2nz": "MTE2", "store": "MTE3", "fixpipe": "FIX"}.get(name, "V")
        spaces = {t[2] for t in [*ins[1], *outs[1]]}
        if pipe == "V" and "cbuf" in spaces:
            pipe = "MTE2"  # filled with a constant by the unit that loads it
        names, types = outs if name in ("load", "nd2nz") or not ins[1] else ins
        if name == "nd2nz":
            names, types = ins
        if pipe == "V" and outs[1]:  # the wider side: a reduction reads, a broadcast writes
            sides = [s for s in (ins, outs) if s[1] and s[0]]
            static = [_elements(s[1][0][0]) for s in sides]
            if None not in static:
                wide = max(static)  # type: ignore[type-var]
                self.count(Op(name, pipe, wide, max(_BYTES.get(k, 4) for k in kinds), kinds))
                return
            operands = ", ".join(_size(_name(s[0][0])) for s in sides if _is_memref(s))
            size = max(_BYTES.get(k, 4) for k in kinds)
            self.count(Op(name, pipe, None, size, kinds), f"most(0, {operands})")
            return
        if not types:
            raise CannotFollowError(f"unknown operands of {text[:120]}")
        elements = _elements(types[0][0])
        self.count(
            Op(name, pipe, elements, _BYTES.get(types[0][1], 4), kinds), _size(_name(names[0]))
        )


def _is_memref(side: tuple[list[str], list[Any]]) -> bool:
    return bool(side[1])


def _results(text: str) -> tuple[list[str], str]:
    """Names of what an operation gives, and the operation."""
    found = re.match(r"(%[\w:-]+(?:, %[\w:-]+)*) = (.*)", text)
    if found is None:
        return [], text
    names: list[str] = []
    for word in found.group(1).split(", "):
        name, _, count = word.partition(":")
        names += [f"{name}#{i}" for i in range(int(count))] if count else [name]
    return names, found.group(2)


def _distinct(lines: Sequence[str]) -> list[str]:
    """The lines of a function, where no two values have one name: blocks side by side share them.

    A name that can be seen is never given again, so those of a line's results may be read from
    their scope as well as those of its operands.
    """
    used: dict[str, int] = {}
    scopes: list[dict[str, str]] = []
    found: list[str] = []
    for line in lines:
        text = line.strip()
        if text.startswith("}") and scopes:
            scopes.pop()
        given, operation = _given(text)
        for name in given:
            scopes[-1][name] = _fresh(name, used)
        if text.endswith("{"):
            scopes.append({})
            head = re.match(r"func\.func|scf\.for (%[\w-]+)", operation)
            inner = re.findall(r"(%[\w-]+) = ", operation) if head and head.group(1) else []
            for name in inner if inner else re.findall(r"(%arg\d+): ", text):
                scopes[-1][name] = _fresh(name, used)
        known = {name: new for scope in scopes for name, new in scope.items()}
        words = re.split(r"(%[\w-]+)", text)
        found.append("".join(known.get(word, word) for word in words))
    return found


def _given(text: str) -> tuple[list[str], str]:
    """Names that a line gives to its results, and the operation."""
    found = re.match(r"(%[\w:-]+(?:, %[\w:-]+)*) = (.*)", text)
    if found is None:
        return [], text
    return [word.split(":")[0] for word in found.group(1).split(", ")], found.group(2)


def _fresh(name: str, used: dict[str, int]) -> str:
    used[name] = used.get(name, 0) + 1
    return name if used[name] == 1 else f"{name}_again{used[name]}"


def _name(value: str) -> str:
    """A Python name for an SSA value (or a number, as it is)."""
    value = value.strip()
    return "v_" + value[1:].replace("#", "__").replace("-", "_") if value[0] == "%" else value


def _size(name: str) -> str:
    """The variable that holds the elements of the memref called ``name``."""
    return f"{name}_size"


def _numbers(text: str) -> str:
    return ", ".join(_name(word) for word in text.split(",") if word.strip())


def _elements(shape: str) -> int | None:
    """Elements of a shape as types write it, ``16x128x``; None where a size varies."""
    if "?" in shape:
        return None
    return math.prod(int(n) for n in shape.split("x") if n)


def _constant(text: str) -> str:
    value = text.split("arith.constant ", 1)[1].split(" : ")[0].strip()
    if value in ("true", "false"):
        return str(int(value == "true"))
    return value if re.fullmatch(r"-?\d+", value) else "UNKNOWN"


def _affine(text: str) -> tuple[list[str], list[str]]:
    """(names, Python expressions) of an affine map's text."""
    left, right = text.split("->", 1)
    tree = ast.parse(
        right.strip().replace("floordiv", "//").replace("ceildiv", "@").replace("mod", "%"),
        mode="eval",
    ).body
    parts = tree.elts if isinstance(tree, ast.Tuple) else [tree]
    return re.findall(r"[ds]\d+", left), [ast.unparse(_Ceil().visit(part)) for part in parts]


class _Ceil(ast.NodeTransformer):
    """``a @ b`` stands for ceildiv, which binds like the other divisions and is none in Python."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.MatMult):
            return ast.Call(ast.Name("ceil"), [node.left, node.right], [])
        return node
