"""MODEL on the command line: timm:name, hf:type-or-path, torch:Constructor(…), or module:callable of one's own."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from explicit_dropout.cli.causes import cause
from explicit_dropout.errors import ExplicitDropoutError, InputError

FORMS = """one of
  timm:NAME                         timm:vit_tiny_patch16_224
  hf:TYPE, hf:FOLDER, hf:USER/NAME  hf:bert   hf:./checkpoint   hf:config.json
  torch:CONSTRUCTOR(ARGUMENTS)      'torch:TransformerEncoderLayer(32, 4)'
  MODULE:CALLABLE, FILE:…           my.models:build   my_model.py:build
where a callable returns a model, or a model and its inputs"""
LISTED = 8
"""Callables of a module that an error names."""


@dataclass(frozen=True)
class Example:
    """A model and what to call it with; `inputs` is None where nobody knows."""

    model: nn.Module
    inputs: tuple[Any, ...] | None = ()
    keywords: Mapping[str, Any] | None = None

    def call(self) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        if self.inputs is None:
            raise ExplicitDropoutError(
                f"what {type(self.model).__name__} is called with is not known. Return it beside the model: "
                "(model, tensor), (model, (tensor, …)) or (model, {'name': tensor, …})."
            )
        return self.inputs, self.keywords or {}


def load(spec: str, settings: Iterable[str] = (), *, batch: int = 2, tokens: int = 16, seed: int = 0) -> Example:
    """The model that MODEL names, randomly initialised unless it is a checkpoint, with example inputs."""
    kind, _, rest = spec.partition(":")
    if not kind or not rest:
        raise InputError("MODEL", FORMS, repr(spec))
    options = _settings(settings)
    torch.manual_seed(seed)
    builder: Callable[[str, dict[str, Any], int, int], Example] = {
        "timm": _timm,
        "hf": _huggingface,
        "torch": _torch,
    }.get(kind, lambda *_: _callable(kind, rest, options))
    try:
        return builder(rest, options, batch, tokens)
    except ExplicitDropoutError:
        raise
    except Exception as error:  # whatever a library, or a function of one's own, comes up with
        file = getattr(sys.modules.get(kind), "__file__", None) or kind
        raise ExplicitDropoutError(f"{spec} could not be built: {cause(error, file)}") from error


def _settings(pairs: Iterable[str]) -> dict[str, Any]:
    """key=value pairs; a value is a Python literal if it reads as one, else text."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise InputError("--set", "key=value", repr(pair))
        try:
            settings[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            settings[key] = {"true": True, "false": False, "none": None}.get(value.lower(), value)
    return settings


def _imported(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if error.name and error.name.split(".")[0] == name:
            raise ExplicitDropoutError(f"{name} is not installed:  pip install 'explicit-dropout[{extra}]'") from error
        raise ExplicitDropoutError(f"{name} could not be imported: {cause(error)}") from error
    except RuntimeError as error:  # torchvision built for another torch
        raise ExplicitDropoutError(f"{name} could not be imported: {cause(error)}") from error


# ---------------------------------------------------------------------------------------------- timm


def _timm(name: str, settings: dict[str, Any], batch: int, tokens: int) -> Example:
    del tokens
    timm = _imported("timm", "timm")
    if not timm.is_model(name):
        near = _like(name, timm.list_models()) or "; timm.list_models() has their names"
        raise InputError("timm:NAME", f"a model of timm{near}", repr(name))
    model = _built(timm.create_model, name, pretrained=False, **settings)
    channels, height, width = timm.data.resolve_model_data_config(model)["input_size"]
    embedding = getattr(model, "patch_embed", None)
    height, width = getattr(embedding, "img_size", None) or (height, width)
    return Example(model, (torch.randn(batch, channels, height, width),))


# ---------------------------------------------------------------------------------------------- Hugging Face


def _huggingface(name: str, settings: dict[str, Any], batch: int, tokens: int) -> Example:
    hf = _imported("transformers", "transformers")
    attention = {key: settings.pop(key) for key in ("attn_implementation",) if key in settings}
    path = Path(name).expanduser()
    known = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING_NAMES
    if path.exists():
        folder = path.parent if path.is_file() else path
        config = _built(hf.AutoConfig.from_pretrained, str(path), **settings)
        has_weights = any(file.suffix in (".safetensors", ".bin") for file in folder.iterdir())
        model = (
            _built(hf.AutoModel.from_pretrained, str(folder), config=config, **attention)
            if has_weights and path.is_dir()
            else _built(hf.AutoModel.from_config, config, **attention)
        )
    elif name in known:
        usual = _built(hf.AutoConfig.for_model, name)
        for key in settings:
            if not hasattr(usual, key):  # which transformers would keep, and read nowhere
                near = _like(key, usual.to_dict())
                raise InputError("--set", f"a setting of {type(usual).__name__}{near}", repr(key))
        config = _built(hf.AutoConfig.for_model, name, **settings)
        model = _built(hf.AutoModel.from_config, config, **attention)
    elif "/" not in name:
        raise InputError("hf:…", f"a model type{_like(name, known)}, a folder, a config.json or USER/NAME", repr(name))
    else:
        try:
            config = hf.AutoConfig.from_pretrained(name, **settings)
            model = hf.AutoModel.from_pretrained(name, config=config, **attention)
        except (OSError, ValueError) as error:
            raise ExplicitDropoutError(f"there is no folder {name}, and the hub does not give it: {error}") from error
    return Example(model, (), _huggingface_inputs(model, batch, tokens))


def _huggingface_inputs(model: Any, batch: int, tokens: int) -> dict[str, Any]:
    """Random inputs of the kinds that the model's forward names."""
    config, names = model.config, inspect.signature(model.forward).parameters
    inner = [config, *(getattr(config, part, None) for part in ("text_config", "vision_config", "encoder", "decoder"))]

    def setting(*keys: str, default: Any = None) -> Any:
        return next((v for c in inner for k in keys if (v := getattr(c, k, None)) is not None), default)

    vocabulary = setting("vocab_size", default=0)
    length = min(tokens, setting("max_position_embeddings", "n_positions", default=tokens) or tokens)

    def words() -> Tensor:
        return torch.randint(min(5, vocabulary - 1), vocabulary, (batch, length))

    inputs: dict[str, Any] = {}
    main = model.main_input_name
    if main == "pixel_values" or ("pixel_values" in names and getattr(config, "vision_config", None) is not None):
        size = setting("image_size", default=224)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        inputs["pixel_values"] = torch.randn(batch, setting("num_channels", default=3), height, width)
    if main == "input_ids" or ("input_ids" in names and getattr(config, "text_config", None) is not None):
        inputs["input_ids"] = words()
    if main == "input_values":
        mel = getattr(config, "num_mel_bins", None)
        inputs[main] = torch.randn(batch, config.max_length, mel) if mel else torch.randn(batch, 8000)
    if main == "input_features":
        frames = 2 * setting("max_source_positions", default=50)
        inputs[main] = torch.randn(batch, setting("num_mel_bins", default=80), frames)
    if not inputs:
        raise ExplicitDropoutError(
            f"what {type(model).__name__} is called with (its {main}) is not known here. Write a function that returns "
            "(model, {'name': tensor, …}) and give MODULE:FUNCTION in place of hf:…"
        )
    if "decoder_input_ids" in names:
        inputs["decoder_input_ids"] = words()
    if "use_cache" in names:
        inputs["use_cache"] = False
    return inputs


# ---------------------------------------------------------------------------------------------- torch.nn


def _torch(expression: str, settings: dict[str, Any], batch: int, tokens: int) -> Example:
    """A constructor of torch.nn, its arguments literals or further constructors; nothing else is evaluated."""
    try:
        tree = ast.parse(expression, mode="eval").body
    except SyntaxError as error:
        raise InputError("torch:…", "a constructor, such as TransformerEncoderLayer(32, 4)", expression) from error
    call = tree if isinstance(tree, ast.Call) else ast.Call(tree, [], [])
    model = _construct(call, settings)
    if not isinstance(model, nn.Module):
        raise InputError("torch:…", "a module", expression)
    return _torch_inputs(model, batch, tokens)


def _construct(node: ast.expr, extra: Mapping[str, Any]) -> Any:
    if not isinstance(node, ast.Call):
        try:
            return ast.literal_eval(node)
        except ValueError as error:
            raise InputError(
                "torch:…", "literals and constructors of torch.nn as arguments", ast.unparse(node)
            ) from error
    name = ast.unparse(node.func).removeprefix("torch.").removeprefix("nn.")
    known = {own: found for own, found in vars(nn).items() if isinstance(found, type) and issubclass(found, nn.Module)}
    if name not in known:
        raise InputError("torch:…", f"a class of torch.nn{_like(name, known)}", name)
    arguments = [_construct(argument, {}) for argument in node.args]
    keywords: dict[str, Any] = {str(keyword.arg): _construct(keyword.value, {}) for keyword in node.keywords}
    return _built(known[name], *arguments, **{**keywords, **extra})


def _torch_inputs(model: nn.Module, batch: int, tokens: int) -> Example:
    attention = next((m for m in model.modules() if isinstance(m, nn.MultiheadAttention)), None)
    if attention is None:
        return Example(model, None)

    def sequence(length: int, width: int | None = None) -> Tensor:
        size = (batch, length) if attention.batch_first else (length, batch)
        return torch.randn(*size, width or attention.embed_dim)

    if isinstance(model, nn.MultiheadAttention):
        shorter = max(2, tokens // 2)
        if attention.kdim == attention.vdim == attention.embed_dim:
            x = sequence(tokens)
            return Example(model, (x, x, x))
        return Example(model, (sequence(tokens), sequence(shorter, attention.kdim), sequence(shorter, attention.vdim)))
    if isinstance(model, nn.Transformer | nn.TransformerDecoder | nn.TransformerDecoderLayer):
        return Example(model, (sequence(tokens), sequence(max(2, tokens // 2))))
    return Example(model, (sequence(tokens),))


# ---------------------------------------------------------------------------------------------- one's own


def _callable(source: str, name: str, settings: dict[str, Any]) -> Example:
    """package.module:callable, or file.py:callable."""
    module = _module(source)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        raise InputError("MODEL", f"a callable of {source}: {_listed(name, _offered(module))}", name)
    made = found if isinstance(found, nn.Module) else _called(found, settings) if callable(found) else found
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise InputError("MODEL", "a callable that returns a model, or (model, inputs)", f"{type(made).__name__}")
    if inputs is None:
        return Example(model, None)
    if isinstance(inputs, Mapping):
        return Example(model, (), inputs)
    return Example(model, tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,))


def _called(function: Callable[..., Any], settings: dict[str, Any]) -> Any:
    try:
        return function(**settings)
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # not the call was wrong, but something inside
        name = getattr(function, "__qualname__", type(function).__name__)
        raise ExplicitDropoutError(f"{name} does not take what was given: {error}") from error


def _module(source: str) -> types.ModuleType:
    if source.endswith(".py"):
        path = Path(source)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if not path.is_file() or spec is None or spec.loader is None:
            raise InputError("MODEL", "a Python file that exists, before the colon", source)
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        _import_from(path.resolve().parent)
        spec.loader.exec_module(module)
        return module
    _import_from(Path.cwd())
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name and source.startswith(error.name):
            raise InputError("MODEL", FORMS, f"{source!r}, and there is no module {error.name!r}") from error
        raise


def _import_from(folder: Path) -> None:
    """Let neighbours be imported, as in `python FILE.py` and `python -m MODULE`.

    For the rest of the process, as there: a function may import a neighbour only when it builds the model, and a model
    only when it runs.
    """
    if sys.path[:1] != [str(folder)]:
        sys.path.insert(0, str(folder))


def _offered(module: types.ModuleType) -> list[str]:
    """The callables of a module by name, functions first.

    Of a file only its own: what it imports are its tools. A package imports in `__init__` what it offers.
    """
    public = {name: value for name, value in vars(module).items() if callable(value) and not name.startswith("_")}
    if hasattr(module, "__path__"):
        return list(public)
    own = [name for name, value in public.items() if getattr(value, "__module__", None) == module.__name__]
    return sorted(own, key=lambda name: not inspect.isroutine(public[name]))


def _listed(name: str, known: list[str]) -> str:
    """Some names, and whether there are more; the one that was meant, if that can be guessed."""
    if not known:
        return "it has none"
    shown = [*known[:LISTED], *(["…"] if len(known) > LISTED else [])]
    close = difflib.get_close_matches(name, known, 1)
    return ", ".join(shown) + "".join(f"; closest: {one}" for one in close)


def _like(name: str, known: Iterable[str]) -> str:
    """Up to three names that may have been meant: those that go on where it ends, else those that resemble it."""
    names = list(known)
    close = [one for one in names if name and one.startswith(name)] or difflib.get_close_matches(name, names, 3)
    return f", such as {', '.join(close[:3])}" if close else ""


def _built(constructor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return constructor(*args, **kwargs)
    except (TypeError, ValueError, AttributeError, AssertionError, OSError) as error:
        name = getattr(constructor, "__qualname__", type(constructor).__name__)
        raise ExplicitDropoutError(f"{name} does not take what was given: {error}") from error
