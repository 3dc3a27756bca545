"""Model families.

Each is a file or a folder; no other place of the package names one. A family is a subclass of ModelShape
(weights/sharding/hf_names.py) with its `model_type`. It says in which way the family differs from attention
and MLP with a norm before each: as data where that is possible, else as methods. `families()` finds the
classes in the modules of this folder; there is no list of them. They do not import torch, because a
configuration is checked before that. What needs torch is named by the class and imported when it is used:

    layer_class     a subclass of Layers (model/layers.py): modules of megatron's layers
    cpu_engine      a module with prepare(): what vLLM needs on a CPU

A technique, such as experts, partly rotated heads or recurrent layers, is what the rest of the package may
know and ask for. What only the families of one folder use is in that folder, also if it has a name of its
own: gated delta nets, attention sinks, YaRN. When a second folder needs it, it moves to model/ or to
weights/sharding/, under the name of the technique.
"""
