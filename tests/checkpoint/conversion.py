"""Functions of a rank in test_convert.py, in their own file so that ranks do not import transformers."""

import resource

import pytest
import torch
import torch.distributed as dist

from megatron_stppo.checkpoint.convert import export_hf, on_first
from megatron_stppo.config import ConfigError
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.weights.sharding.hf_checkpoint import load_hf
from megatron_stppo.weights.sharding.hf_names import read_shape
from megatron_stppo.weights.sharding.hf_write import write_tensors
from megatron_stppo.weights.sharding.spans import row_widths, training_layouts, training_spans
from tests.weights.reshard.pieces import blank

LAYOUT = Layout(2, 2, 1)


def import_and_export(folder, families):
    """load_hf on TP2 x PP2, export_hf in one file, in several, in bfloat16, and onto an existing folder."""
    for family in families:
        template = folder / family
        shape = read_shape(template)
        widths, layouts = row_widths(shape), training_layouts(shape, LAYOUT)
        spans = training_spans(shape, LAYOUT, dist.get_rank(), tied_copy=True)
        parameters = blank(spans, widths)
        load_hf(template, shape, spans, parameters)
        if shape.tied and dist.get_rank() == 3:  # must not matter: the first stage's embedding is the source
            parameters["output_layer.weight"].zero_()
        export_hf(folder / "out" / family, parameters, layouts, shape, template)
        with pytest.raises(ConfigError, match="exists; name a new folder"):
            export_hf(folder / "out" / family, parameters, layouts, shape, template)
        half = {name: tensor.bfloat16() for name, tensor in parameters.items()}
        export_hf(folder / "split" / family, half, layouts, shape, template, file_bytes=20000)
        with pytest.raises(ConfigError, match=r"No such file .*nowhere"):
            export_hf(folder / "failed", parameters, layouts, shape, folder / "nowhere")
    return sorted(path.name for path in folder.iterdir())


def write_too_much(folder):
    """Return the error of a rank. The first one may write files of at most 4 kB."""
    if dist.get_rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    (folder / "config.json").write_text("{}")
    tensors = {"a": torch.zeros(4096)}
    with pytest.raises(ConfigError) as raised:
        on_first(lambda: write_tensors(tensors, folder / "a.safetensors", folder / "config.json"))
    return str(raised.value)
