"""A module as SANY (the parser in TLC's jar) reads it: its XML, turned into `syntax`."""

import shutil
import subprocess
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

from conformance.proof.syntax import (
    NOWHERE,
    Apply,
    Binder,
    Definition,
    Expr,
    Kind,
    Module,
    Number,
    Old,
    Place,
    Refused,
    Text,
    Unread,
)
from conformance.tla import java, tlc

STANDARD = {"Naturals", "Integers", "FiniteSets", "Sequences", "TLC", "Reals", "Bags"}
TIMEOUT_S = 60.0


class ParseError(RuntimeError):
    """SANY does not accept the module; the text is SANY's."""


def export(module: Path, folders: Sequence[Path] = tlc.FOLDERS) -> str:
    """SANY's XML of a module. Modules that it extends are looked for beside it, then in `folders`.

    Raises:
        ParseError: SANY does not accept the module.
    """
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        for folder in reversed([module.parent, *folders]):
            for file in folder.glob("*.tla"):
                shutil.copyfile(file, scratch / file.name)
        command = [java.java(), "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-cp", str(java.jar())]
        done = subprocess.run(
            [*command, "tla2sany.xml.XMLExporter", "-o", module.name],
            cwd=scratch, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    if not done.stdout.startswith("<?xml"):
        raise ParseError(f"SANY does not accept {module.name}:\n{done.stdout}{done.stderr}")
    return done.stdout


class _Reader:
    """Reads one XML document; nodes refer to each other by UID."""

    def __init__(self, text: str) -> None:
        root = ET.fromstring(text)  # written by our own jar
        context = root.find("context")
        entries = [] if context is None else context.findall("entry")
        self.nodes = {entry.findtext("UID", ""): next(c for c in entry if c.tag != "UID") for entry in entries}
        self.module = Module(root.findtext("RootModule", ""))

    def read(self) -> Module:
        for key, node in self.nodes.items():
            name = node.findtext("uniquename", "")
            if node.tag == "OpDeclNode":
                self._declare(node, name)
            elif node.tag == "UserDefinedOpKind" and self._place(node).module not in STANDARD:
                self._define(key, node, name)
            elif node.tag == "ModuleNode":
                self._name(node)
            elif node.tag == "AssumeNode":
                self.module.assumptions.append(self._body(node))
        return self.module

    def _declare(self, node: ET.Element, name: str) -> None:
        if node.findtext("arity", "0") != "0":
            raise Refused(self._place(node), f"constant operator {name}")
        (self.module.constants if node.findtext("kind") == "2" else self.module.variables).append(name)

    def _define(self, key: str, node: ET.Element, name: str) -> None:
        found = [ref.findtext("UID", "") for ref in node.findall("params/leibnizparam/FormalParamNodeRef")]
        self.module.definitions[key] = Definition(name, tuple(found), self._body(node))

    def _name(self, node: ET.Element) -> None:
        """What stands at the top level of a module; definitions in a LET do not."""
        for ref in node.findall("UserDefinedOpKindRef"):
            key = ref.findtext("UID", "")
            self.module.named[self.nodes[key].findtext("uniquename", "")] = key

    def _body(self, node: ET.Element) -> Expr:
        body = node.find("body")
        if body is None or len(body) == 0:
            raise Refused(self._place(node), f"{node.tag} without a body")
        return self._expr(body[0])

    def _place(self, node: ET.Element) -> Place:
        at = node.find("location")
        if at is None:
            return NOWHERE
        return Place(
            at.findtext("filename", "?"), int(at.findtext("line/begin", "0")), int(at.findtext("column/begin", "0"))
        )

    def _expr(self, node: ET.Element) -> Expr:
        place = self._place(node)
        match node.tag:
            case "NumeralNode":
                return Number(place, int(node.findtext("IntValue", "")))
            case "StringNode":
                return Text(place, node.findtext("StringValue", ""))
            case "AtNode":
                return Old(place)
            case "LetInNode":
                return self._body(node)  # its definitions are entries like all others
            case "OpApplNode":
                return self._apply(node, place)
        return Unread(place, f"{node.tag} (an operator as an argument, a label, a proof, …)")

    def _apply(self, node: ET.Element, place: Place) -> Apply | Unread:
        operator = node.find("operator")
        if operator is None or len(operator) == 0:
            return Unread(place, "an application without an operator")
        key = operator[0].findtext("UID", "")
        target = self.nodes[key]
        name = target.findtext("uniquename", "")
        args = tuple(self._expr(arg) for arg in node.findall("operands/*"))
        bound = node.findall("boundSymbols/*")
        if any(b.tag != "bound" or b.find("tuple") is not None for b in bound):
            return Unread(place, "a bound name without a domain, or a tuple of names: write one name with its domain")
        binders = tuple(self._binder(b) for b in bound)
        kind = self._kind(target)
        return Apply(place, kind, name, key, args, binders) if kind else Unread(place, f"{name}, a {target.tag}")

    def _kind(self, target: ET.Element) -> Kind | None:
        match target.tag:
            case "OpDeclNode":
                return "constant" if target.findtext("kind") == "2" else "variable"
            case "FormalParamNode":
                return "parameter"
            case "BuiltInKind":
                return "builtin"
            case "UserDefinedOpKind":
                return "builtin" if self._place(target).module in STANDARD else "defined"
        return None

    def _binder(self, node: ET.Element) -> Binder:
        keys = tuple(ref.findtext("UID", "") for ref in node.findall("FormalParamNodeRef"))
        names = tuple(self.nodes[key].findtext("uniquename", "") for key in keys)
        domain = [child for child in node if child.tag != "FormalParamNodeRef"]
        return Binder(keys, names, self._expr(domain[0]))


def parse(text: str) -> Module:
    """The module in SANY's XML.

    Raises:
        Refused: it has a construct that `syntax` has no place for.
    """
    return _Reader(text).read()


def read(module: Path, folders: Sequence[Path] = tlc.FOLDERS) -> Module:
    """Parse the file `module`.

    Raises:
        ParseError: SANY does not accept it.
        Refused: it has a construct that is not understood.
    """
    return parse(export(module, folders))
