"""What a kernel is, read from its name: a label of at most 40 characters, and a class.

`at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, …>(…)` is
`add<bf16>`, an elementwise kernel. The rules follow how names are made: C++ templates around a
functor, underscores between the parameters of a library's kernel, Inductor's and MTIA's own forms.
There is no list of kernels, so names never seen before get a label too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import translate
from functools import lru_cache

from instrument.base.printable import printable
from instrument.base.prose import shortened
from instrument.read.facts.device_work import COMMUNICATION_NAMES

LONGEST_LABEL = 40
CLASSES = (
    "matrix product", "attention", "convolution", "elementwise", "normalisation", "reduction",
    "copy", "communication", "other",
)  # fmt: skip
_COMMUNICATES = re.compile("|".join(map(translate, COMMUNICATION_NAMES)))
# Longer names and deeper templates are not read to their end.
_MOST_CHARACTERS, _DEEPEST = 2500, 40
_UNNAMED = re.compile(r"(?:\(anonymous namespace\)|<unnamed>|\{anonymous\})::|\(anonymous\)::")
_NO_NAME = re.compile(r"[/;\"\\]|[^\w\x20-\x7e]")  # what no name of a function has
_PLAIN = re.compile(r"Mem(?:cpy|set)|triton_")
_RESULT = re.compile(r"^(?:void |std::enable_if.*?::type |std::enable_if_t<.*?> (?=[\w:]+<))+")
_SYMBOL = re.compile(r"[<>,()]|[^<>,()]+")
_QUALIFIERS = re.compile(r"\b(?:void|const|volatile|struct|class|enum|typename)\b|[*&{}\[\]]")
_BUILTIN = re.compile(r"(?:unsigned |signed |long )*(?:char|short|int|long|float|double|bool)")
# From here on, a C++ name says where its lambda or method is.
_INNER = re.compile(r"::(?:operator\b|lambda\b|_FUN\b|run$|invoke$).*")
_MANGLED = re.compile(r"(\d+)(?=[A-Za-z_])|DF16([b_])|L[a-z](\d+)E|([IE])|[ST][0-9A-Z]*_|S[a-z]")

# Element types, by the last part of the name of the type, or as a parameter between underscores.
_TYPES = {
    "float": "f32", "fp32": "f32", "f32": "f32", "float32": "f32", "double": "f64", "f64": "f64",
    "half": "f16", "__half": "f16", "half_t": "f16", "_float16": "f16", "fp16": "f16",
    "f16": "f16", "float16": "f16", "h": "f16", "bfloat16": "bf16", "bfloat16_t": "bf16",
    "__nv_bfloat16": "bf16", "nv_bfloat16": "bf16", "__hip_bfloat16": "bf16",
    "hip_bfloat16": "bf16", "bf16": "bf16", "tf32": "tf32", "tfloat32_t": "tf32", "fp8": "fp8",
    "e4m3": "e4m3", "e5m2": "e5m2", "mxfp4": "mxfp4", "mxfp8": "mxfp8", "nvfp4": "nvfp4",
    "fp4": "fp4", "e2m1": "e2m1", "char": "i8", "signed char": "i8", "int8_t": "i8", "i8": "i8",
    "s8": "i8", "int8": "i8", "unsigned char": "u8", "uint8_t": "u8", "u8": "u8", "short": "i16",
    "int": "i32", "int32_t": "i32", "unsigned int": "u32", "long": "i64", "long long": "i64",
    "int64_t": "i64", "unsigned long": "u64", "bool": "bool", "f8": "fp8", "byte": "u8",
}  # fmt: skip
_NARROW = re.compile(r"e[2345]m[0123]")  # the formats of 8 bits and fewer
# Templates that say how a functor runs, and not what it does; the first argument that is no number,
# type, container or offset calculator is the functor.
_WRAPPER = re.compile(
    r"(?:\w*elementwise_kernel\w*|gpu_kernel_impl\w*|gpu_index_kernel|opmath_\w*gpu_kernel\w*"
    r"|reduce_kernel|ReduceOp|func_wrapper_t|[AB]?(?:Unary|Binary)Functor|opmath_\w*_functor"
    r"|multi_tensor_apply_kernel|distribution_\w*|uniform_and_transform|normal_and_transform"
    r"|Kernel2?|device_kernel|kentry|kernel_wrapper|global_kernel|enable_sm\w+|RocclrKernel"
    r"|\w*ElementwiseKernel\w*|\w*ForLoop\w*|_kernel_agent|for_each\w*|static_kernel"
    r"|ParallelForAgent|parallel_for\w*)"
)
_NO_FUNCTOR = re.compile(
    r"[-\d.]*[uUlL]*|\w*(?:Metadata\w*|OffsetCalculator|Array|array|tuple|_policy\w*|Policy\w*)"
    r"|\w*policy_hub|\w*Generator\w*|true|false|T\d+|nullptr"
)
_FOREACH_FUNCTOR = re.compile(r"(?:Unary|Binary|Pointwise|Ternary)Op\w*Functor|LpNormFunctor")
_PREFIXES = {"reduce_kernel": "reduce ", "multi_tensor_apply_kernel": "foreach "}
# What a functor's name ends with, and begins with, besides what it does.
_ENDINGS = re.compile(
    r"(?:_?(?:cuda|hip|xpu|impl|Impl|CUDA|kernel|Kernel|Functor|functor|Ops|op))+$"
)
_BEGINNINGS = re.compile(r"^(?:CUDAFunctor(?:OnSelf)?_|launch_|vectorized_|_+(?=\w))")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
# Namespaces, and names of classes, that do not tell kernels apart.
_COMMON = re.compile(
    r"at|c10|native|cuda|hip|xpu|detail|impl|internal|kernels?|device|std|thrust|core|ops|templates"
    r"|cutlass(?:_cudnn\w*|__5x_\w+)?|_GLOBAL__N_\w*|\w*_?NS|CUB_\w+|THRUST_\w+|__detail|binary_internal|memory"
)
_SAYS_NOTHING = re.compile(
    r"(?:\w*Gemm|global|main|my|the)?_?[Kk]ernel|functor|run|apply|operator|forward"
)

_NO_ENDING = re.compile(r"void|true|false|v1|gpu|lambda|int|const|unsigned|char|[A-Z]\d?")

# A parameter of a library's kernel, between underscores.
_TILE = re.compile(r"(?:tilesize|tile|MT|bt|t)?(\d+)x(\d+)(?:x\d+)*(?:u\d+)?")
_LAYOUT = re.compile(r"[nt]{2,3}|[NT]{2,3}")
_TYPED = re.compile(
    r"(?:(?:bf|tf|mxfp|nvfp|fp|f|i|s|u|int)\d+|(?:mx)?e\dm\d|bfloat16|half|x(?=[a-z]))+", re.I
)
_ONE_TYPE = re.compile(
    r"mxfp\d|nvfp\d|bfloat16|(?:bf|tf|fp|int|f|i|s|u)\d+?(?=\D|$|f32|f16)|e\dm\d", re.I
)
_KEPT = re.compile(r"bias|relu|gelu|silu|swiglu|splitk|grouped|batched|scaled", re.I)
_VENDOR = re.compile(
    r"ampere|volta|turing|hopper|blackwell|maxwell|pascal|sm\d+\w?|gfx\d+\w?|cutlass\w*|\d+\w?|xmma"
    r"|tensorop|simt|wmma|cudnn|infer|train|generated|fort|native|cublas|implicit|indexed|optimized"
    r"|gtcx\d?|knob|void|relu|sparse|tensor"
)
_PRODUCT = re.compile(r"(?P<letter>[a-z]{0,2}?)(?P<mma>\d*)(?:gemm|cudnn)(?:Ex)?")
_LETTERS = {"h": "f16", "s": "f32", "d": "f64", "c": "c64", "z": "c128", "t": "bf16", "q": "e4m3"}
_TENSILE = re.compile(r"Cijk_A(?P<a>il|li)k_B(?P<b>lj|jl)k_(?P<type>F8|B8|I8|4xi8|X|[HBSDCZ])")
_TENSILE_TYPES = {"F8": "fp8", "B8": "bf8", "I8": "i8", "4xi8": "i8", "X": "tf32", "B": "bf16"}

_COLLECTIVE = re.compile(
    r"(?:void )?(?P<library>nccl|rccl|msccl|mscclpp|hccl|oneccl)\w*?kernel\w*?_(?P<rest>[A-Z]\w*)",
    re.I,
)
_OPERATION = re.compile(r"Sum\w*|Prod|MinMax|Max|Min|PreMulSum|RING|TREE")
_MTIA = re.compile(r"(?P<what>[\w:.]+)-dtype_(?P<type>\w+?)(?:-.*)?")
_CUTE_DSL = re.compile(r"^kernel_cutlass_(?:kernel_)?|_(?:object_at|tensorptr|tensor000).*")
_FMHA = re.compile(r"fmha\w*?Kernel_Q(?:kv)?(?P<type>[A-Z][a-z0-9]+)\w*?H(?:Qk)?(?P<size>\d+)")
_HEAD_DIMENSION = re.compile(
    r"traits\w*<(?:\(int\))?(\d+)"
    r"|tuple<(?:\w+::)?C<\(?\w*\)?\d+>, (?:\w+::)?C<\d+>, (?:\w+::)?C<(\d\d+)>"
    r"|(?:hdim|hd|head_?dim)_?(\d+)|(?:16|32|[Ee]\dm\d)H(\d+)"
)
_TEMPLATE_TILE = re.compile(
    r"GemmShape<(\d+), (\d+)|tuple<(?:\w+::)?C<(\d\d+)>, (?:\w+::)?C<(\d+)>"
)

# The classes, by the first pattern that is found in what names a kernel; see `kernel_class`.
_FOUND = [
    (kind, re.compile(pattern, re.VERBOSE | re.IGNORECASE))
    for kind, pattern in (
        ("copy", r"^mem(?:cpy|set) | dma_ | reshape_and_cache"),
        ("elementwise", r"^triton_(?:poi|for)_"),
        (
            "attention",
            r"""fmha | fla?sh(?!_?infer|_?mla_?meta) | attn | attention | sdpa | (?<![a-z])mha
            | _mla_ | (?:paged|ragged)_?kv | _m?qa_ | MergeState""",
        ),
        ("normalisation", r"^triton_(?:red|per)_.*(?:norm|softmax)"),
        ("reduction", r"^triton_(?:red|per|spl)_"),
        (
            "convolution",
            r"""[fdbw]_?prop | [dw]grad(?!_bgrad) | conv(?!ert|_?to) | winograd | [sh]cudnn
            | im2col | col2im | cask_ | igemm_(?:fwd|bwd|wrw) | fft[12]d_ | flip_filter
            | Sp3Asm | _wrw""",
        ),
        (
            "matrix product",
            r"""(?<!fb)gemm | gemv | Cijk_ | nvjet | matmul | \bbmm | _b?mm_ | _b?mm\b | dot_kernel
            | _dot_ | splitk | marlin | machete | fused_moe_kernel | \bfc\b | linear_ | addmm""",
        ),
        (
            "normalisation",
            r"norm(?!al) | normali[sz]ation | softmax | \bbn_ | _bn_ | welford | \bln_ | _ln_",
        ),
        (
            "copy",
            r"""copy(?!right) | (?<![a-z])cat(?![a-z]) | CatArray | transpose | permute
            | n(?:chw|hwc)_?(?:to|2) | fillBuffer | gather | scatter | index_?select | pad_nd""",
        ),
        (
            "elementwise",
            r"""element_?wise | pointwise | multi_tensor | foreach | fill
            | (?:add|mul|sub|div|divide|scale)(?![a-z]) | scalePacked | relu | gelu | silu | swish
            | swiglu | sigmoid | tanh | dropout | cast | quant | activation | act_and | rotary
            | rope | adam | sgd | loop\w*fusion | random | uniform | where | exp(?![a-z]) | sqrt
            | pow | clamp | clip | bias | epilogue | log2?\b""",
        ),
        (
            "reduction",
            "reduc | pool | sum | mean | arg_?m | max | min | norm | histogram | count | scan",
        ),
    )
]


@dataclass
class _Name:
    """A C++ name.

    Attributes:
        text: the name without template arguments and parameters.
        arguments: the template arguments.
        parameters: the parameters of the last lambda in the name that has parameters.
    """

    text: str = ""
    arguments: list[_Name] = field(default_factory=list)
    parameters: str = ""

    @property
    def path(self) -> list[str]:
        """The namespaces and the name."""
        return _INNER.sub("", self.text).split("::")


def kernel_label(name: str) -> str:
    """Return what a kernel does, its element type and its shape, in at most 40 characters.

    Such as `add<bf16>`, `gemm 128×128 tn bf16`, `nccl AllReduce sum f16 ring LL`. Several kernels
    can have the same label; see `kernel_labels`.
    """
    return _read(name)[0]


def kernel_class(name: str) -> str:
    """Return which of `CLASSES` a kernel belongs to; softmax is a normalisation."""
    return _read(name)[1]


def kernel_labels(names: Iterable[str]) -> dict[str, str]:
    """Return the labels of the kernels of one table, each different.

    Where several kernels have the same label, the first word in which all their names differ is
    added to it, or else a number.
    """
    alike: dict[str, list[str]] = {}
    for name in sorted({*names}):
        alike.setdefault(kernel_label(name), []).append(name)
    labels = {group[0]: label for label, group in alike.items() if len(group) == 1}
    taken = {*labels.values()}
    for label, group in alike.items():
        if len(group) == 1:
            continue
        words = [
            [] if name.startswith("_Z") else re.findall(r"[A-Za-z0-9]+", name[:_MOST_CHARACTERS])
            for name in group
        ]
        common = {*words[0]}.intersection(*words) | {*re.findall(r"\w+", label)}
        telling = ([each for each in some if _tells(each, common)] for some in words)
        own = [min(some, key=str.isdigit, default="") for some in telling]
        for number, name in enumerate(group, 1):
            ending = f" {own[number - 1]}" if len({*own}) == len(group) else f" #{number}"
            labels[name] = _free(label, ending.rstrip(), taken)
            taken.add(labels[name])
    return labels


def _free(label: str, ending: str, taken: set[str]) -> str:
    while (text := shortened(label, LONGEST_LABEL - len(ending)) + ending) in taken:
        ending += "#"
    return text


def _tells(word: str, common: set[str]) -> bool:
    """Whether a word tells names with the same label apart, and a reader something."""
    is_known = word in common or _COMMON.fullmatch(word) or _NO_ENDING.fullmatch(word)
    return not is_known and len(word) <= LONGEST_LABEL // 3


@lru_cache(maxsize=1 << 14)
def _read(name: str) -> tuple[str, str]:
    """Return the label and the class of a kernel."""
    text = _UNNAMED.sub("", name[:_MOST_CHARACTERS])
    text = _RESULT.sub("", _CUTE_DSL.sub("", text) if text.startswith("kernel_cutlass_") else text)
    if mtia := _MTIA.fullmatch(text):
        outer = _Name(mtia["what"].split(".")[0])
    elif _NO_NAME.search(text):
        text = re.sub(r"\\[nrt]|\s+", "_", printable(text))
        outer = _Name(text)
    else:
        outer = _mangled(text) if text.startswith("_Z") else _parsed(text)
    functor, type_ = _functor(outer)
    if text.startswith("_Z"):  # without the nesting, so the types of all arguments
        type_ = _first_type(outer.arguments)
    kind = _class(name, f"{outer.text or text} {'::'.join(functor.path)}")
    if collective := _COLLECTIVE.match(text):
        label = _collective(collective["library"], collective["rest"])
    elif tensile := _TENSILE.match(text):
        label = _tensile(text, tensile)
    elif mtia:
        label = f"{functor.path[-1]}<{_TYPES.get(mtia['type'].lower(), mtia['type'].lower())}>"
    elif _PLAIN.match(text) or _NO_NAME.search(name) or not functor.text.strip("_ "):
        label = text
    elif kind in ("matrix product", "convolution", "attention"):
        label = _library(functor.path[-1], kind) or _shaped(text, functor, outer, type_, kind)
    elif functor is outer and not outer.arguments and len(outer.path[-1]) <= LONGEST_LABEL:
        label = outer.path[-1]
    else:
        label = _PREFIXES.get(outer.path[-1], "") + _what(functor, outer)
        label += f"<{type_}>" if type_ else ""
    return shortened(label.strip() or name.strip() or "(no name)", LONGEST_LABEL), kind


def _class(name: str, what: str) -> str:
    if _COMMUNICATES.match(name.lower()):
        return "communication"
    return next((kind for kind, pattern in _FOUND if pattern.search(what)), "other")


def _parsed(text: str) -> _Name:
    """Read a C++ name, as it is written after demangling, in one pass."""
    top = _Name()
    stack, skipped, taken = [top], 0, False
    for match in _SYMBOL.finditer(text):
        symbol, current = match[0], stack[-1]
        if skipped:  # inside parentheses
            skipped += (symbol == "(") - (symbol == ")")
            if taken and skipped:
                current.parameters += symbol
        elif symbol == "(":
            before, is_lambda = current.text.rstrip(), current.text.endswith("lambda")
            if current is top and before and not before.endswith(("operator", "lambda")):
                break  # the parameters of the kernel
            skipped, taken = 1, is_lambda and not text.startswith("()", match.start())
            if taken:
                current.parameters = ""
        elif symbol == "<" and len(stack) <= _DEEPEST:
            current.arguments.append(_Name())
            stack.append(current.arguments[-1])
        elif symbol == ">" and len(stack) > 1:
            stack.pop()
        elif symbol == "," and len(stack) > 1:
            stack.pop()
            stack[-1].arguments.append(_Name())
            stack.append(stack[-1].arguments[-1])
        elif symbol not in "<>,)":
            current.text += _QUALIFIERS.sub("", symbol)
    for each in _all(top):
        each.text = each.text.strip()
        if " " in each.text and not _BUILTIN.fullmatch(each.text):
            each.text = each.text.replace(" ::", "::").split("  ")[-1].strip()
    if ("(" in text[:-1] and not _PLAIN.match(text)) or top.arguments:
        top.text = top.text.rpartition(" ")[2]
    return top


def _mangled(text: str) -> _Name:
    """Read the identifiers, types and numbers of a mangled name (`_ZN2ck…`)."""
    top, at, inside = _Name(), 2, False
    while match := _MANGLED.search(text, at):
        digits, half, number, letter = match.groups()
        at = match.end()
        if digits:
            word, at = text[at : at + int(digits)], at + int(digits)
            if inside:
                top.arguments.append(_Name(word))
            else:
                top.text += f"::{word}" if top.text else word
        elif top.text and letter == "I":
            inside = True
        elif inside and (half or number):
            top.arguments.append(_Name(number or {"b": "bf16", "_": "f16"}[half]))
    return top


def _all(name: _Name) -> Iterator[_Name]:
    """Yield a name and all names in its template arguments, in the order of the text."""
    waiting = [name]
    while waiting:
        each = waiting.pop()
        yield each
        waiting += reversed(each.arguments)


def _functor(name: _Name) -> tuple[_Name, str]:
    """Follow templates that only say how something runs; return what runs, and its element type."""
    found, type_ = name, ""
    while _WRAPPER.fullmatch(found.path[-1]):
        inner = next((each for each in found.arguments if _is_functor(each)), None)
        before = found.arguments[: found.arguments.index(inner)] if inner else found.arguments
        type_ = type_ or next(filter(None, map(_type, before)), "")
        if inner is None:
            return found, type_
        found = inner
    type_ = type_ or _type(_Name(found.parameters.split(",")[0].strip()))
    return found, type_ or _first_type([*_all(found)][1:])


def _first_type(names: Iterable[_Name]) -> str:
    """Return the first floating-point type, or else the first type; "" if there is none."""
    types = [each for each in map(_type, names) if each]
    floats = (each for each in types if each[0] not in "iu" and each != "bool")
    return next(floats, types[0] if types else "")


def _is_functor(name: _Name) -> bool:
    no_functor = _NO_FUNCTOR.fullmatch(name.path[-1]) or _COMMON.fullmatch(name.text)
    return not (no_functor or _type(name))


def _type(name: _Name) -> str:
    """Return the short name of an element type; "" for another name."""
    last = name.text.rpartition("::")[2].strip().lower()
    if last == "opaquetype" and name.arguments:
        return f"{name.arguments[0].text.strip('uUlL')}-byte"
    if last == "complex" and name.arguments:
        return {"f32": "c64", "f64": "c128", "f16": "c32"}.get(_type(name.arguments[0]), "")
    narrow = _NARROW.search(last) if "float" in last or "fp8" in last or "fp4" in last else None
    return narrow[0] if narrow else _TYPES.get(last, "")


def _what(functor: _Name, outer: _Name) -> str:
    """Return the words that say what a kernel does."""
    path = [each for each in functor.path if each and not _COMMON.fullmatch(each)] or functor.path
    last = path[-1]
    if functor is not outer and _FOREACH_FUNCTOR.fullmatch(last):
        at = (
            outer.arguments.index(functor) + 1
            if functor in outer.arguments
            else len(outer.arguments)
        )
        operation = next((each for each in outer.arguments[at:] if not _type(each)), None)
        return operation.path[-1] if operation else last
    short = _ENDINGS.sub("", _BEGINNINGS.sub("", last)) or last
    if functor is not outer and "_" not in short:
        short = _CAMEL.sub("_", short).lower()
    if _SAYS_NOTHING.fullmatch(last) or (functor is outer and len(short) < 12 and "_" not in short):
        path = path[:-1] if _SAYS_NOTHING.fullmatch(last) and len(path) > 1 else [*path[:-1], short]
        while len(path) > 1 and len("::".join(path)) > LONGEST_LABEL - 6:
            del path[0]
        return "::".join(path[-3:])
    return short


def _shaped(text: str, functor: _Name, outer: _Name, type_: str, kind: str) -> str:
    """Return the label of a templated matrix product, convolution or attention."""
    what, shape = _what(functor, outer), ""
    if fmha := _FMHA.match(text):
        return f"fmha hdim{fmha['size']} {_types(fmha['type'])}"
    if kind == "attention":
        found = _HEAD_DIMENSION.search(text)
        shape = f" hdim{next(filter(None, found.groups()))}" if found else ""
    elif tile := _TEMPLATE_TILE.search(text):
        first, second = filter(None, tile.groups())
        shape = f" {first}×{second}"
        what = "gemm" if what.lower().startswith("gemm") else what
    if shape:
        return f"{shortened(what, LONGEST_LABEL - len(shape) - 6)}{shape} {type_}"
    return f"{what}<{type_}>" if type_ else what


def _library(name: str, kind: str) -> str:
    """Return the label of a kernel whose name lists its parameters between underscores, or ""."""
    tokens = name.strip("_").split("_")
    tile = next(filter(None, map(_TILE.fullmatch, tokens)), None)
    products = [found for each in tokens if (found := _PRODUCT.fullmatch(each))]
    product = max(products, key=lambda each: bool(each["letter"]), default=None)
    types = [each for each in tokens if _TYPED.fullmatch(each)]
    if not tile and not (types and kind == "attention"):
        return ""
    layout = next((each.lower() for each in tokens if _LAYOUT.fullmatch(each)), "")
    kept = [each.lower() for each in tokens if _KEPT.fullmatch(each)]
    head = []
    for each in tokens:
        if _TYPED.fullmatch(each) or _TILE.fullmatch(each) or _LAYOUT.fullmatch(each):
            break
        if not (_VENDOR.fullmatch(each) or _KEPT.fullmatch(each) or _PRODUCT.fullmatch(each)):
            head.append(each)
    type_ = _types(types[0]) if types else ""
    if product and not type_ and product["letter"]:
        type_ = _LETTERS.get(product["letter"][-1], "")
        type_ = "tf32" if type_ == "f32" and product["mma"] in ("1688", "884") else type_
    if tokens[0] == "nvjet":
        code = next((each for each in tokens[1:] if not _VENDOR.fullmatch(each)), "")
        head, type_, layout = ["gemm"], _LETTERS.get(code[:1], ""), layout[:2]
    pass_ = re.search(r"fprop|dgrad|wgrad|(?<=_)fwd|(?<=_)bwd|wrw|winograd", name)
    if kind == "convolution" and (pass_ or product):
        head, layout = ["conv", *([pass_[0]] if pass_ else [])], ""
    words = [
        " ".join(head) if not head or head[0] in ("conv", "gemm") else "_".join(head) or "gemm"
    ]
    shape = f"{tile[1]}×{tile[2]}" if tile else ""
    return " ".join(filter(None, [words[0] or "gemm", shape, layout, type_, *dict.fromkeys(kept)]))


def _types(token: str) -> str:
    """Return the element types in a parameter such as `bf16xbf16xmxfp4` or `tf32f32`."""
    found = [each.lower() for each in _ONE_TYPE.findall(token)]
    short = [*dict.fromkeys(_TYPES.get(each, each) for each in found)]
    return "×".join(short) if "x" in token.replace("mx", "") else "".join(short[:1])


def _tensile(text: str, found: re.Match[str]) -> str:
    """Return the label of a kernel of Tensile (rocBLAS, hipBLASLt): `Cijk_Alik_Bljk_BBS_…`."""
    tile, type_ = re.search(r"_MT(\d+)x(\d+)", text), found["type"]
    layout = ("t" if found["a"] == "li" else "n") + ("n" if found["b"] == "lj" else "t")
    shape = f" {tile[1]}×{tile[2]}" if tile else ""
    return f"gemm{shape} {layout} {_TENSILE_TYPES.get(type_) or _LETTERS[type_.lower()]}"


def _collective(library: str, rest: str) -> str:
    """Return the label of a kernel of NCCL or RCCL: `AllReduce_Sum_f16_RING_LL`, in any order."""
    words = [_TYPES.get(each.lower(), each) for each in rest.replace("8_t", "8").split("_") if each]
    known = [each.lower() if _OPERATION.fullmatch(each) else each for each in words]
    known.sort(key=lambda each: each in ("ring", "tree") or each.startswith(("LL", "SIMPLE")))
    return " ".join([library.lower(), *dict.fromkeys(known)])
