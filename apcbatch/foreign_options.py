"""Options and commands of other tools (vLLM, SGLang, transformers, llama.cpp), each with what to give here instead.

A sentence names options of apcbatch in braces, which become flags on the command line and plain names elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_NO_SERVER = "there is no server: `apcbatch run INPUT` answers a file"
_NO_QUANTISATION = (
    "weights are not quantised when they are loaded: give {model} a copy that `apcbatch convert` has made"
)
_TENSOR = "matrices are not split over GPUs; {gpus} N splits the layers, and {ray} runs a whole model on each GPU"
_PIPELINE = "give {gpus} N, which splits the layers over N GPUs"
_DATA = "give {ray} local, which runs a whole model on each GPU"

# Name of an option -> sentence without its end.
FOREIGN_OPTIONS: Mapping[str, str] = {
    "tensor_parallel_size": _TENSOR,
    "tp": _TENSOR,
    "pipeline_parallel_size": _PIPELINE,
    "pp": _PIPELINE,
    "data_parallel_size": _DATA,
    "dp": _DATA,
    "max_num_seqs": "give {max_running} N",
    "max_num_batched_tokens": "give {max_batch_tokens} N",
    "max_model_len": "give {max_request_tokens} N, the prompt and new tokens of a request",
    "gpu_memory_utilization": "give {pool_size} SIZE for snapshots, and {max_running} N for running requests",
    "enable_prefix_caching": "prefixes are always shared; leave it out ({policy} none turns that off)",
    "served_model_name": "there is no server, and a line may name the model by its folder; leave it out",
    "lora_path": "give the base model as {model}, and the folder of one LoRA as {adapter}",
    "quantization": _NO_QUANTISATION,
    "load_in_4bit": _NO_QUANTISATION,
    "load_in_8bit": _NO_QUANTISATION,
    "kv_cache_dtype": "keys and values have the type of {dtype}, and recurrent states are float32; leave it out",
    "trust_remote_code": "code of a model folder is never run; leave it out",
    "tokenizer": "the tokenizer is that of the folder of {model}; leave it out",
    "revision": "nothing is downloaded: download the revision (hf download --revision), and give its folder as {model}",
    "download_dir": "nothing is downloaded: give the folder as {model}, or set HF_HOME to the cache that has it",
    "api_key": _NO_SERVER,
    "host": _NO_SERVER,
    "port": _NO_SERVER,
    "batch_size": "give {max_running} N, the requests at once, or {max_batch_tokens} N, the prefill tokens of a step",
    "max_new_tokens": "give {max_tokens} N",
    "do_sample": "give {temperature} F: 0 is greedy, above 0 draws",
    "num_beams": "there is no beam search; leave it out",
    "torch_dtype": "give {dtype} TYPE",
    "device_map": "give {device} cpu or cuda, and {gpus} N to split the layers over N GPUs",
}
FOREIGN_COMMANDS: Mapping[str, str] = {
    "serve": _NO_SERVER,
    "chat": "there is no dialogue: write the conversation as a line of INPUT, and `apcbatch run INPUT` answers it",
    "bench": "`make bench` of a checkout measures a model on this machine",  # a command until 0.1.0
    "generate": "write the prompts as lines of INPUT, and `apcbatch run INPUT` answers them",
}


def foreign_option(name: str, as_flags: bool) -> str:
    """Return the sentence about an option of another tool; empty for any other name. as_flags: name options of apcbatch
    as flags."""
    words = re.split(r"{(\w+)}", FOREIGN_OPTIONS.get(name, ""))
    words[1::2] = [f"--{word.replace('_', '-')}" if as_flags else word for word in words[1::2]]
    return "".join(words)
