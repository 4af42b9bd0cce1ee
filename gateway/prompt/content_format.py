"""Does a chat template take a message's content as text, or as a list of parts?

vLLM finds out by looking for a loop over the content in the template (``_detect_content_format`` in
vllm/renderers/hf.py); this follows its rules, because the answer changes what the template is given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from jinja2 import nodes


def takes_parts(root: nodes.Template) -> bool:
    """Return whether the parsed template loops over message content, vLLM's content format ``openai``."""
    try:
        return _loops_over_content(root)
    except _NotUnderstood:
        return False


class _NotUnderstood(Exception):
    """Unpacking of messages or of content, before which vLLM gives up and takes the content for text."""


def _loops_over_content(root: nodes.Template) -> bool:
    messages = _message_names(root)
    in_macros, parameters = _macro_loops(root, messages)
    for loop in root.find_all(nodes.For):
        if (
            any(_reaches(loop.iter, name, "content") for name in messages)
            or (isinstance(loop.iter, nodes.Name) and loop.iter.name in parameters.get(id(loop), ()))
            or (isinstance(loop.iter, nodes.Name) and loop.iter.name == "content" and id(loop) not in in_macros)
        ):
            _name_of(loop.target)
            return True
    return False


def _macro_loops(root: nodes.Template, messages: list[str]) -> tuple[set[int], dict[int, set[str]]]:
    """Return the loops inside macros, and for each those macro parameters that some caller gives message content."""
    inside: set[int] = set()
    parameters: dict[int, set[str]] = {}
    calls = list(root.find_all(nodes.Call))
    for macro in root.find_all(nodes.Macro):
        given = set(_content_parameters(macro, calls, messages))
        for loop in macro.find_all(nodes.For):
            inside.add(id(loop))
            if given:
                parameters[id(loop)] = given
    return inside, parameters


def _content_parameters(macro: nodes.Macro, calls: list[nodes.Call], messages: list[str]) -> Iterator[str]:
    names = [parameter.name for parameter in macro.args]
    for call in calls:
        if not _is_name(call.node, macro.name):
            continue
        keywords = [(keyword.key, keyword.value) for keyword in call.kwargs if isinstance(keyword, nodes.Keyword)]
        for name, value in [*zip(names, call.args, strict=False), *keywords]:
            if name in names and any(_reaches(value, message, "content") for message in messages):
                yield name


def _message_names(root: nodes.Template) -> list[str]:
    """Return the names under which single messages appear in loops over ``messages`` or a variable made from it."""
    lists = ["messages"]
    pending = deque(lists)
    while pending:
        source = pending.popleft()
        for assignment in root.find_all(nodes.Assign):
            if _reaches(assignment.node, source) and (name := _name_of(assignment.target)) not in lists:
                lists.append(name)
                pending.append(name)
    loops = [loop for loop in root.find_all(nodes.For) if any(_reaches(loop.iter, name) for name in lists)]
    return [_name_of(loop.target) for loop in loops]


def _name_of(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _NotUnderstood
    return target.name


def _reaches(node: nodes.Node, name: str, key: str | None = None) -> bool:
    """Return whether ``node`` is ``name`` (or ``name.key``), possibly through filters, tests and slices."""
    while isinstance(node, (nodes.Filter, nodes.Test, nodes.Getitem)) and node.node is not None:
        if isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Slice):
            break
        node = node.node
    if key is None:
        return _is_name(node, name)
    if isinstance(node, nodes.Getitem):
        return _is_name(node.node, name) and isinstance(node.arg, nodes.Const) and node.arg.value == key
    return isinstance(node, nodes.Getattr) and _is_name(node.node, name) and node.attr == key


def _is_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
