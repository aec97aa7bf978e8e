"""Every option is read where it can act; one that nothing reads would be accepted and ignored.

The package's source is read for attributes of the configuration: `config.training.steps` anywhere, and `section.steps`
where `section` is a parameter annotated with the section's class, a variable that was set from `config.training`, or
an attribute of the object that was set from either. Reading in `config/` alone does not count, as a check does nothing
with a value, but for its `resolve_` functions, whose results the others use.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import torchtitan
from torchtitan.config.job import OPTIONS, SECTIONS

PACKAGE = Path(torchtitan.__file__).parent
CLASSES = {cls.__name__: section for section, cls in SECTIONS.items()}
# The parser reads it from the command line, before there is a configuration; test_parse.py sees it act.
READ_BY_PARSER = {"job.config_file"}

Names = dict[str, str]  # what in the scope holds a section: its name, or self.name, to the section


def options_read_in(source: str, *, only_functions: str = "") -> set[str]:
    """Return the options that a module reads, in functions whose name starts with `only_functions`."""
    tree = ast.parse(source)
    aliases = dict(_imported_classes(tree))
    found: set[str] = set()
    for scope, names in _scopes(tree, aliases):
        if not only_functions or scope.name.startswith(only_functions):
            found |= set(_options_in(scope, names))
    return found


def _imported_classes(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield what the module calls each section's class, and the section."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "torchtitan.config.sections":
            for alias in node.names:
                yield alias.asname or alias.name, CLASSES[alias.name]


def _scopes(tree: ast.Module, aliases: Names) -> Iterator[tuple[ast.FunctionDef, Names]]:
    """Yield every function with the names that hold sections in it; methods share the attributes of their class."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    methods = {id(method): owner for owner in classes for method in owner.body if isinstance(method, ast.FunctionDef)}
    shared: dict[int, Names] = {id(owner): _fields(owner, aliases) for owner in classes}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for function in functions:
        names = _names(function, aliases)
        if id(function) in methods:
            of_self = {name: section for name, section in names.items() if name.startswith("self.")}
            shared[id(methods[id(function)])].update(of_self)
    for function in functions:
        inherited = shared[id(methods[id(function)])] if id(function) in methods else {}
        yield function, inherited | _names(function, aliases)


def _fields(owner: ast.ClassDef, aliases: Names) -> Names:
    annotated = [node for node in owner.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    return {
        f"self.{ast.unparse(node.target)}": aliases[kind]
        for node in annotated
        if (kind := ast.unparse(node.annotation)) in aliases
    }


def _names(function: ast.FunctionDef, aliases: Names) -> Names:
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    names = {
        argument.arg: aliases[kind]
        for argument in arguments
        if argument.annotation and (kind := ast.unparse(argument.annotation)) in aliases
    }
    for target, value in _assignments(function):
        section = _section(value, names)
        if section:
            names[ast.unparse(target)] = section
    return names


def _assignments(function: ast.FunctionDef) -> Iterator[tuple[ast.expr, ast.expr]]:
    for node in ast.walk(function):
        if isinstance(node, ast.AnnAssign) and node.value:
            yield node.target, node.value
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    yield from zip(target.elts, node.value.elts, strict=True)
                else:
                    yield target, node.value


def _section(value: ast.expr, names: Names) -> str:
    """Return the section that an expression holds, or the empty string."""
    if ast.unparse(value) in names:
        return names[ast.unparse(value)]
    if isinstance(value, ast.Attribute) and ast.unparse(value.value).split(".")[-1] == "config":
        return value.attr if value.attr in SECTIONS else ""
    return ""


def _options_in(function: ast.FunctionDef, names: Names) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            section = _section(node.value, names)
            if section:
                yield f"{section}.{node.attr}"


def test_every_option_is_read() -> None:
    read = set(READ_BY_PARSER)
    for path in PACKAGE.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        if path.parent.name != "config":
            read |= options_read_in(source)
        elif path.name in ("validate.py", "cp_method.py"):
            read |= options_read_in(source, only_functions="resolve_")
    assert sorted(OPTIONS.keys() - read) == []


def test_the_reader_sees_each_way_of_reading() -> None:
    source = """
from torchtitan.config.sections import Comm, Debug as DebugSection
class Part:
    comm: Comm
    def __init__(self, debug: DebugSection, config) -> None:
        self.section, self.x = debug, 3
        self.training = config.training
    def act(self, config: JobConfig):
        metrics: Metrics = config.metrics
        return self.section.seed, self.training.steps, metrics.log_freq, config.model.name, self.config.job.description
    def more(self):
        return self.comm.init_timeout_seconds
"""
    assert options_read_in(source) == {
        "comm.init_timeout_seconds",
        "debug.seed",
        "training.steps",
        "metrics.log_freq",
        "model.name",
        "job.description",
    }


def test_the_reader_is_not_fooled_by_equal_names() -> None:
    source = '''
from torchtitan.config.sections import Training
def other(validation: Validation, training: Training, options, loader):
    """Set training.max_norm; return config.training.seq_len."""
    training.steps = 3
    return validation.steps, options.lr, loader.training.seq_len, "config.training.dtype"
def resolve(training: Training):
    return training.gc_freq
'''
    assert options_read_in(source) == {"training.gc_freq"}
    assert options_read_in(source, only_functions="other") == set()
