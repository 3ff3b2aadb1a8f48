"""Builds the configuration: flags override the environment, then come file, preset and defaults.

`add_flags` adds one flag per field to a parser, `load_config` merges all layers and checks the
result, and `flag_table` lists the flags for the documentation.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from .checks import check
from .keys import with_keys
from .options import (
    ConfigError,
    Option,
    all_options,
    did_you_mean,
    read_text,
    read_value,
    section_options,
)
from .preset import load_preset, preset_model, preset_names
from .schema import Config, SpeculativeConfig
from .speculative import read_speculative

_SPEC = "speculative_config"
_SPEC_DOC = (
    'a method such as ngram or off, or a JSON object such as {"method":"eagle3","model":"M"}'
)
_CONFIG_DOC = "YAML file of settings, named as the flags are"
_MERGE = "tag:yaml.org,2002:merge"  # the key `<<`, which may occur more than once
Layer = dict[str, Any]  # option name -> value; _SPEC -> SpeculativeConfig


class _KeepsLines(argparse.HelpFormatter):
    """A help formatter that keeps the line breaks of a help text and indents what it wraps."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        if "\n" not in text:
            return super()._split_lines(text, width)
        lines: list[str] = []
        for line in text.splitlines():
            lines += textwrap.wrap(line, width, subsequent_indent="  ")
        return lines


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, --config, --speculative-config and a flag per field."""
    parser.formatter_class = _KeepsLines
    parser.epilog = (
        "SIZE is a number such as 4000, 4k (4000) or 4K (4096); m, M, g and G work alike. "
        "A flag that accepts several values can be repeated, or its values separated by commas."
    )
    presets = ", ".join(preset_names())
    parser.add_argument(
        "model_argument",
        metavar="MODEL",
        nargs="?",
        default=argparse.SUPPRESS,
        help=f"{all_options()['model'].doc} (presets: {presets}; default: {Config().model.model})",
    )
    parser.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help=_CONFIG_DOC)
    sections = {
        name: parser.add_argument_group(name, (cls.__doc__ or "").strip())
        for name, cls in get_type_hints(Config).items()
    }
    sections["speculative"].add_argument(
        "-sc",
        "--speculative-config",
        metavar="METHOD|JSON",
        default=argparse.SUPPRESS,
        help=f"{_SPEC_DOC}; its keys:\n{_speculative_keys()}".replace("%", "%%"),
    )
    for option in all_options().values():
        add_flag(sections[option.section], option)


def add_flag(group: argparse._ArgumentGroup, option: Option) -> None:
    """Add the flag of an option, without a default: it is absent if it is not given."""
    names = [option.flag] if option.short is None else [option.short, option.flag]
    text = (option.doc + _shown_default(option)).replace("%", "%%")
    if option.kind is bool:
        group.add_argument(
            *names, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
        )
        return
    metavar = "{" + ",".join(option.choices) + "}" if option.choices else _kind(option)
    action = "append" if option.many else "store"
    group.add_argument(*names, metavar=metavar, action=action, default=argparse.SUPPRESS, help=text)


def _kind(option: Option) -> str:
    """The placeholder of the value in the help.

    Every integer flag accepts a suffix, but only sizes show it: no one writes a port as 8k."""
    if option.kind is int and option.name.endswith(("_len", "_bytes", "_tokens")):
        return "SIZE"
    return option.kind.__name__.upper()


def _speculative_keys() -> str:
    """One line of help for each key of `--speculative-config`."""
    options = section_options("speculative", SpeculativeConfig)
    return "\n".join(f"{o.name}: {_doc(o)}{_shown_default(o)}" for o in options)


def _doc(option: Option) -> str:
    return option.doc + (f": {', '.join(option.choices)}" if option.choices else "")


def _shown_default(option: Option) -> str:
    shown = _default(option)
    return "" if shown is None or "default:" in option.doc else f" ({shown})"


def _default(option: Option) -> str | None:
    """`default: ...` for the help, or None if the option has no default value to show."""
    if option.default is None or option.default == () or option.default == "":
        return None
    if option.kind is bool:
        return "default: on" if option.default else "default: off"
    values = option.default if isinstance(option.default, tuple) else (option.default,)
    return f"default: {','.join(map(str, values))}"


def load_config(
    flags: argparse.Namespace | Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """The checked configuration from parsed flags and environment variables.

    Raises ConfigError for a value that is unknown, of the wrong type, out of range, or at odds
    with another."""
    given = dict(vars(flags)) if isinstance(flags, argparse.Namespace) else dict(flags or {})
    environ = environ or {}
    file = given.get("config") or environ.get("SLIPSTREAM_CONFIG")
    file_layer = read_file(Path(file)) if file else {}
    own = file_layer | _environment_layer(environ) | _flag_layer(given)
    model = own.get("model", Config().model.model)
    merged: Layer = {}
    if model in preset_names() and not Path(model).exists():
        merged = _mapping_layer(load_preset(model), f"preset {model}") | own
        merged["model"] = load_preset(model)["model"]
    else:
        merged = own
    if merged.get("tokenizer"):
        merged["tokenizer"] = preset_model(merged["tokenizer"])
    merged["served_model_name"] = merged.get("served_model_name") or (model,)
    return check(with_keys(_build(merged)))


def _build(layer: Layer) -> Config:
    values = dict(layer)
    sections: dict[str, Any] = {}
    if _SPEC in values:
        sections["speculative"] = values.pop(_SPEC)
    classes = get_type_hints(Config)
    for section, cls in classes.items():
        names = [
            o.name for o in all_options().values() if o.section == section and o.name in values
        ]
        if names:
            sections[section] = cls(**{name: values[name] for name in names})
    return Config(**sections)


def read_flag(option: Option, given: Any) -> Any:
    """The value of a flag as `add_flag` parses it; raises ConfigError if it is invalid."""
    if option.many and isinstance(given, list):  # a repeated flag; each text may have commas
        return tuple(item for text in given for item in read_text(option, option.flag, text))
    return read_text(option, option.flag, given) if isinstance(given, str) else given


def _flag_layer(given: Mapping[str, Any]) -> Layer:
    layer: Layer = {}
    for name, option in all_options().items():
        if name not in given:
            continue
        layer[name] = read_flag(option, given[name])
    if "model_argument" in given:
        positional = given["model_argument"]
        if layer.get("model", positional) != positional:
            raise ConfigError(
                f"--model {layer['model']} and MODEL {positional} differ; give only one of them"
            )
        layer["model"] = positional
    if _SPEC in given:
        layer[_SPEC] = read_speculative("--speculative-config", given[_SPEC])
    return layer


def _environment_layer(environ: Mapping[str, str]) -> Layer:
    """The options set by SLIPSTREAM_* variables.

    Unknown variables are ignored, because Kubernetes sets some for a service named slipstream."""
    layer: Layer = {}
    for name, option in all_options().items():
        text = environ.get(option.variable, "")
        if text and not (name == "port" and text.startswith("tcp://")):  # Kubernetes, as above
            layer[name] = read_text(option, option.variable, text)
    if text := environ.get("SLIPSTREAM_SPECULATIVE_CONFIG", ""):
        layer[_SPEC] = read_speculative("SLIPSTREAM_SPECULATIVE_CONFIG", text)
    return layer


class _RepeatedKey(Exception):
    """A file has two settings of one name. YAML would take the second one silently."""


class _UniqueKeys(yaml.SafeLoader):
    """Reads plain values, and refuses a mapping with a repeated key."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            name, line = (key.tag, key.value), key.start_mark.line + 1
            if name in lines:
                raise _RepeatedKey(
                    f"{key.value!r} is set twice, in lines {lines[name]} and {line}; keep one of "
                    "them"
                )
            lines[name] = line
        return super().construct_mapping(node, deep)


def read_file(path: Path) -> Layer:
    """The settings in a YAML file.

    Raises ConfigError if the file cannot be read, is not YAML, or has an unknown key or a value of
    the wrong type."""
    try:
        content = yaml.load(path.read_text(), _UniqueKeys)
    except _RepeatedKey as error:
        raise ConfigError(f"--config {path}: {error}") from None
    except OSError as error:
        raise ConfigError(
            f"cannot read --config {path}: {(error.strerror or str(error)).lower()}"
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # of encodings, numbers, nesting
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"--config {path}: not valid YAML{where}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: each line must have the form name: value")
    return _mapping_layer(content, str(path))


def _mapping_layer(content: Mapping[Any, Any], where: str) -> Layer:
    layer: Layer = {}
    options = all_options()
    for key, value in content.items():
        name = str(key).replace("-", "_")
        label = f"{key} in {where}"
        if name == _SPEC:
            layer[_SPEC] = read_speculative(label, value)
        elif name in options:
            layer[name] = read_value(options[name], label, value)
        else:
            hint = did_you_mean(name, [*options, _SPEC])
            raise ConfigError(f"{where} has an unknown key {str(key)!r}{hint}")
    return layer


def flag_table() -> str:
    """All flags as the Markdown of docs/flags.md; `python -m slipstream.configs.load` prints it."""
    lines = [
        "# Flags",
        "",
        "Every flag is also a key of the `--config` file (`max_model_len`) and an environment",
        "variable (`SLIPSTREAM_MAX_MODEL_LEN`). A flag overrides the environment, which overrides",
        "the file, which overrides the preset, which overrides the default. A flag that accepts",
        "several values can be repeated, or its values separated by commas.",
        "",
        "| flag | default | description |",
        "| --- | --- | --- |",
        f"| `--config FILE` | | {_CONFIG_DOC} |",
        f"| `-sc`, `--speculative-config METHOD` or `JSON` | the preset's, or off | {_SPEC_DOC} |",
    ]
    for option in all_options().values():
        spellings = [*filter(None, [option.short]), option.flag]
        if option.kind is bool:
            spellings.append(option.flag.replace("--", "--no-", 1))
        names = ", ".join(f"`{spelling}`" for spelling in spellings)
        shown = (_default(option) or "").removeprefix("default: ")
        lines.append(_row(names, shown, _doc(option)))
    lines += ["", "The keys of `--speculative-config`:", "", "| key | default | description |"]
    lines.append("| --- | --- | --- |")
    for option in section_options("speculative", SpeculativeConfig):
        shown = "" if option.default is None else str(option.default)
        lines.append(_row(f"`{option.name}`", shown, _doc(option)))
    return "\n".join(lines) + "\n"


def _row(*cells: str) -> str:
    escaped = [cell.replace("|", r"\|") for cell in cells]  # a bar would end the cell
    return f"| {' | '.join(escaped)} |".replace("|  |", "| |")


if __name__ == "__main__":
    print(flag_table(), end="")
