"""Check that model.path has what a command reads from it: configuration, tensors, tokenizer, chat template.

The tensors are compared with config.json, but not read. Otherwise a tensor that is larger than config.json
says would be cut, and one that nothing reads, such as a bias or the scales of quantised weights, would be
ignored. Does not import torch. Every function raises ConfigError with field, value and remedy.
"""

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from megatron_stppo.config import Config, ConfigError
from megatron_stppo.data.text.tokenizer_files import ENDS, SETTINGS, chat_templates, json_object
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.validation.model_layout import check_model_layout
from megatron_stppo.weights.sharding.hf_fields import check_only
from megatron_stppo.weights.sharding.hf_files import INDEX, SINGLE, entries, in_files, same_bytes
from megatron_stppo.weights.sharding.hf_names import (
    EMBEDDING,
    HEAD,
    ModelShape,
    hf_shapes,
    read_fields,
    read_shape,
)

USER = {"role": "user", "content": "a"}
CHATS = ([USER], [{"role": "system", "content": "a"}, USER])  # a usable template renders one of them
TYPES = ("BF16", "F16", "F32", "F64")
# transformers computes these buffers again, and ignores those of old checkpoints
BUFFERS = re.compile(r"rotary_emb\.inv_freq")
# the value head of a critic, and the heads of reward models, which a critic replaces by its own
OTHER_HEADS = re.compile(r"(score|v_head|classifier)\..*")


def check_model(config: Config) -> None:
    """Check config.json of model.path and model.critic_path, and that both have the same shape."""
    _check_folder("model.path", config.model.path)
    if config.model.critic_path is not None:
        _check_folder("model.critic_path", config.model.critic_path, critic=True)
        _same_network(config.model.path, config.model.critic_path)


def _check_folder(field: str, folder: Path, critic: bool = False) -> None:
    """Check config.json and the tensors' names and shapes. critic: whether another head is accepted."""
    if not folder.is_dir():
        raise ConfigError(
            f"{field}={folder}: no such folder; give a Hugging Face checkpoint (config.json, "
            "tokenizer.json, *.safetensors)"
        )
    if (folder / "adapter_config.json").exists():
        raise ConfigError(
            f"{field}={folder}: holds an adapter (adapter_config.json), which would be ignored; give the "
            "model's own folder, and the adapter as model.lora.path"
        )
    shape = read_shape(folder)
    check_weights(field, folder, shape, critic)
    if not critic:
        check_only(folder, read_fields(folder), "architectures", shape.architecture)


def check_weights(field: str, folder: Path, shape: ModelShape, critic: bool = False) -> None:
    """Raise ConfigError unless the folder has exactly the tensors of a model of this shape.

    critic: whether the model's head is not read. A folder without weights passes: `plan` needs none, and
    loading them reports the absence.
    """
    if not any((folder / name).exists() for name in (SINGLE, INDEX)):
        return
    where, wanted = f"{field}={folder}", hf_shapes(shape, "none" if critic else "vocabulary")
    held = {
        key: entry
        for key, entry in entries(folder, shape).items()
        if not BUFFERS.search(key) and not key.startswith(shape.left_out)
    }
    if critic:
        held = {key: entry for key, entry in held.items() if key != HEAD and not OTHER_HEADS.match(key)}
    elif shape.tied and HEAD in held and EMBEDDING in held:
        if not same_bytes(held[HEAD], held[EMBEDDING]):  # transformers does not tie other heads
            raise ConfigError(
                f"{where}: tie_word_embeddings=true, but {HEAD!r} differs from {EMBEDDING!r}; set "
                "tie_word_embeddings=false in config.json"
            )
        del held[HEAD]
    for key, entry in held.items():
        if entry.dtype not in TYPES:
            raise ConfigError(
                f"{where}: tensor {key!r} has type {entry.dtype}, and quantised weights are not supported; "
                "use the model's folder in bfloat16, or dequantise it"
            )
    if absent := sorted(wanted.keys() - held.keys()):
        raise ConfigError(
            f"{where}: has no tensor {absent[0]!r} ({len(absent)} of {len(wanted)} are missing); the "
            "checkpoint is not complete, or its config.json is of another model"
        )
    for key, size in wanted.items():
        if held[key].shape != size:
            raise ConfigError(
                f"{where}: tensor {key!r} has shape {[*held[key].shape]}, its config.json gives {[*size]}; "
                "correct config.json"
            )
    if unread := sorted(held.keys() - wanted.keys()):
        raise ConfigError(
            f"{where}: tensor {unread[0]!r} ({len(unread)} in all) does not belong to a model of its "
            "config.json and would be ignored; correct config.json, or remove it"
        )


def left_out(folder: Path, shape: ModelShape) -> str:
    """Return a line that says which tensors of the folder are not read, or "" if all are."""
    if not any((folder / name).exists() for name in (SINGLE, INDEX)):
        return ""
    names = [entry.key for entry in in_files(folder)]
    counts = {prefix: sum(name.startswith(prefix) for name in names) for prefix in shape.left_out}
    left = [f"{count} tensors {prefix}*" for prefix, count in counts.items() if count]
    return f"model.path={folder}: left out are {' and '.join(left)}; only text is trained" if left else ""


def check_reference(config: Config, layout: Layout, tokenizers: bool = True) -> None:
    """Check model.reference_path: that it is a model of any size that the layout divides, whose context fits
    the trajectories, and that it has all tokens of model.path, with the same ids."""
    folder = config.model.reference_path
    if folder is None:
        if config.algorithm.advantage == "kl":
            raise ConfigError(
                "model.reference_path=null with algorithm.advantage=kl: the policy would be its own teacher, "
                "and every advantage 0; give the teacher's folder"
            )
        return
    where = f"model.reference_path={folder}"
    if not config.needs_reference:
        raise ConfigError(
            f"{where} with algorithm.kl_coefficient=0: no reference is built; leave it out, or set "
            "algorithm.kl_coefficient, or algorithm.preset=distil"
        )
    _check_folder("model.reference_path", folder)
    shape, policy = read_shape(folder), read_shape(config.model.path)
    try:
        check_model_layout(shape, config.parallel, layout)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    if shape.max_positions < config.max_context:
        raise ConfigError(
            f"{where}: its max_position_embeddings={shape.max_positions} is less than the longest trajectory "
            f"of {config.max_context} tokens; give another model, or set rollout.max_context"
        )
    if shape.vocab < policy.vocab:
        raise ConfigError(
            f"{where}: its vocab_size={shape.vocab} is less than model.path's of {policy.vocab}; give a "
            "model with the same tokens"
        )
    if tokenizers:
        check_same_tokens("model.reference_path", folder, "model.path", config.model.path)


def check_same_tokens(field: str, folder: Path, other: str, wanted: Path) -> None:
    """Raise ConfigError unless the tokenizer of `folder` has all tokens of that of `wanted`, with the same
    ids. field, other: what an error calls the two folders."""
    own, there = _tokens(other, wanted), _tokens(field, folder)
    if missing := sorted(own.items() - there.items()):
        raise ConfigError(
            f"{field}={folder}: its tokenizer gives {len(missing)} of {other}'s {len(own)} tokens another id "
            f"or none, such as {missing[0][0]!r}; give a model with the same tokens"
        )


def _tokens(field: str, folder: Path) -> dict[str, int]:
    """Return the ids of all tokens of a folder's tokenizer.json."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{field}={folder}: holds no tokenizer.json; add the model's own")
    try:
        return Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    except Exception as error:  # the Rust library raises no narrower type
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{field}={folder}: tokenizer.json is not a tokenizer ({reason}); "
            "copy it again from the model's source"
        ) from None


def _same_network(actor: Path, critic: Path) -> None:
    """Check that actor and critic have the same shape. The critic is built with the actor's shape, so that a
    different rotary base, for example, would be ignored without an error."""
    wanted, own = asdict(read_shape(actor)), asdict(read_shape(critic))
    for name in sorted(wanted.keys() - {"tied", "max_positions"}):
        if own[name] != wanted[name]:
            raise ConfigError(
                f"model.critic_path={critic}: its {name}={own[name]!r}, model.path's is {wanted[name]!r}; "
                "give a checkpoint of the same architecture, or leave it out"
            )


def check_tokenizer(config: Config) -> None:
    """Check that the tokenizer can be read, and that its ids fit the model's vocabulary and the critic."""
    known = _tokens("model.path", config.model.path).values()
    check_end_ids(config)
    added = json_object(config.model.path / SETTINGS).get("added_tokens_decoder") or {}
    largest = max([*known, *(int(number) for number in added if str(number).isdigit())], default=0)
    vocabulary = read_shape(config.model.path).vocab
    if largest >= vocabulary:
        raise ConfigError(
            f"model.path={config.model.path}: its tokenizer has the token id {largest}, config.json's "
            f"vocab_size={vocabulary} allows ids below it; give the tokenizer of this model"
        )
    critic = config.model.critic_path
    if critic is not None and (critic / "tokenizer.json").is_file():
        check_same_tokens("model.critic_path", critic, "model.path", config.model.path)


def check_end_ids(config: Config) -> None:
    """Check the end-of-text ids of config.json and generation_config.json: ids of the vocabulary."""
    folder = config.model.path
    vocabulary = read_shape(folder).vocab
    for name in ENDS:
        ids = json_object(folder / name).get("eos_token_id")
        for number in ids if isinstance(ids, list) else [] if ids is None else [ids]:
            if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < vocabulary:
                raise ConfigError(
                    f"{folder / name}: eos_token_id={ids!r}, not token ids below vocab_size={vocabulary}; "
                    "correct it, or fetch the file again"
                )


def check_chat_template(config: Config) -> None:
    """Check that the tokenizer has a chat template, and that jinja can read all of its templates."""
    folder = config.model.path
    templates = chat_templates(folder)
    if "default" not in templates:
        others = f" but {sorted(templates)}" if templates else ""
        raise ConfigError(
            f"model.path={folder}: its tokenizer has no chat_template{others}; add chat_template.jinja"
        )
    for name, template in templates.items():
        where = f"model.path={folder}: its chat_template {name!r}"
        if not isinstance(template, str) or not template.strip():
            shown = "empty" if isinstance(template, str) else f"{template!r}, not a text"
            raise ConfigError(f"{where} is {shown}; copy it again from the model's source")
        refusals = [_refusal(where, template, chat) for chat in CHATS]
        if name == "default" and all(refusals):
            raise ConfigError(f"{where} rejects every chat ({refusals[0]}); copy it from the model's source")


def _refusal(where: str, template: str, chat: list[dict[str, str]]) -> str:
    """Return why a template does not render a chat, or "".

    Raises ConfigError if the template is not jinja. Other errors do not count: here the template gets neither
    the special tokens nor tools.
    """
    try:
        rendered: Any = render_jinja_template([chat], chat_template=template, add_generation_prompt=True)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"{where} is not jinja (line {error.lineno}: {error.message}); correct the template"
        ) from None
    except Exception as error:  # a template is a program
        return str(error) if type(error) is TemplateError else ""
    (text,), _ = rendered
    return "" if text.strip() else "renders nothing"
