"""The options, in sections. A section reaches only the component that reads it.

The string below a field is its help text: what it does, its unit, and the values that are allowed.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Job:
    """The run as a whole."""

    config_file: str = ""
    """Path of the TOML file to start from; empty: the defaults. Given on the command line only."""
    dump_folder: str = "./outputs"
    """Folder for everything the run writes; made if absent."""
    description: str = ""
    """Free text that is logged at the start."""
    print_config: bool = False
    """Print the resolved configuration as TOML and exit with 0."""


@dataclass(frozen=True)
class Model:
    """The model and its vocabulary."""

    name: str = "llama3"
    """Model family: llama3."""
    flavor: str = "debugmodel"
    """Size of the model: debugmodel, 1B, 3B, 8B, 70B or 405B."""
    attn_type: Literal["sdpa", "flex", "varlen"] = "sdpa"
    """Kernel of attention on CUDA, without context parallelism's gather; sdpa: torch's scaled_dot_product_attention;
    flex: flex_attention with a BlockMask; varlen: the flash kernel for documents side by side. On a CPU all are the
    same blocks of the CPU's flash kernel."""
    attn_mask: Literal["causal", "document"] = "causal"
    """causal: a token attends to all before it in its sequence; document: to those of its own document only, with
    positions that start at 0 in each."""
    sliding_window: int = 0
    """Tokens that a layer attends to, the query's own among them; 0: no limit."""
    attention_chunk_size: int = 0
    """Tokens of a chunk, which attention does not leave, counted by positions in the document; 0: no chunks."""
    full_attention_every: int = 0
    """Every N-th layer attends without window and chunks; 0: none does."""
    tokenizer_path: str = ""
    """Path of a tokenizer.model (tiktoken ranks), a tokenizer.json, or a folder that holds one; empty: the small
    tokenizer that comes with this package."""


@dataclass(frozen=True)
class Training:
    """Data, batch, length and precision."""

    dataset: Literal["python_stdlib", "c4", "local"] = "python_stdlib"
    """python_stdlib: the running Python's own source files; c4: streamed from the Hugging Face hub; local: the files of
    training.dataset_path."""
    dataset_path: str = ""
    """File, folder or glob of JSON, JSONL, Parquet or text, or a saved `datasets` folder; with the default data set it
    means local."""
    dataset_text_field: str = "text"
    """Name of the field that holds the text of a document, in data that has fields."""
    local_batch_size: int = 8
    """Sequences per microbatch and data-parallel rank; 1 or more."""
    global_batch_size: int = -1
    """Sequences per step over all ranks; a multiple of local_batch_size x data-parallel ranks, the rest is gradient
    accumulation. -1: no accumulation."""
    seq_len: int = 2048
    """Tokens of a whole sequence, before context parallelism cuts it; 1 or more."""
    steps: int = 10000
    """Updates in all, those before a resume included; 1 or more."""
    max_norm: float = 1.0
    """Largest norm of all gradients together, clipped above; 0: no clipping."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Dtype of the stored parameters and of the optimizer's state; float64 on the CPU only."""
    mixed_precision_param: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    """Dtype of parameters and activations in forward and backward; float64 on the CPU only."""
    mixed_precision_reduce: Literal["float32", "float64"] = "float32"
    """Dtype in which gradients are summed over ranks; at least as wide as mixed_precision_param."""
    packing: Literal["stream", "best_fit"] = "stream"
    """How documents fill sequences; stream: one after the other, cut where a sequence ends; best_fit: cut only where
    longer than a sequence, the rest of it is padding."""
    position_overflow: Literal["refuse", "restart"] = "refuse"
    """What happens to a document longer than the model's context, with attn_mask document; refuse: an error; restart:
    its positions start again at 0 there."""
    num_workers: int = 0
    """Processes per rank that prepare data; 0: the rank itself does."""
    gc_freq: int = 50
    """Steps between two collections of Python garbage, at the same step on all ranks; 1 or more."""
    loss_chunk_tokens: int | Literal["auto"] = "auto"
    """Tokens whose logits exist at one time, 1 or more; auto: what is fast on the device (256 on a CPU, 2048 on CUDA);
    0: those of the whole microbatch."""


@dataclass(frozen=True)
class Optimizer:
    """The update rule."""

    name: Literal["AdamW", "Adam"] = "AdamW"
    """AdamW: decoupled weight decay; Adam: weight decay is part of the gradient."""
    lr: float = 8e-4
    """Learning rate at the end of the warm-up; above 0."""
    beta1: float = 0.9
    """Decay of the mean of gradients; from 0 to below 1."""
    beta2: float = 0.95
    """Decay of the mean of squared gradients; from 0 to below 1."""
    eps: float = 1e-8
    """Added to the denominator of the update; above 0."""
    weight_decay: float = 0.1
    """Weight decay per update, times the learning rate; 0 or more, 0: off."""
    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """How the update is computed: one kernel, one kernel per operation, or tensor by tensor."""


@dataclass(frozen=True)
class LRScheduler:
    """The learning rate over the run: it warms up, stays, and decays."""

    warmup_steps: int = 200
    """Steps in which the rate rises linearly to optimizer.lr; 0 or more."""
    decay_ratio: float | None = None
    """Share of training.steps, at the end, in which the rate decays; 0 to 1. None: all steps after the warm-up."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""
    min_lr_factor: float = 0.0
    """The rate that the decay ends at, as a factor on optimizer.lr; 0 to 1."""


@dataclass(frozen=True)
class Parallelism:
    """Over how many ranks each axis splits; the product is the number of processes. 1: off."""

    data_parallel_replicate_degree: int = 1
    """Copies of the sharded model; only 1 in this version."""
    data_parallel_shard_degree: int = -1
    """Groups of ranks with different samples, over which FSDP shards parameters; -1: processes / the other degrees."""
    tensor_parallel_degree: int = 1
    """Ranks that share each matrix; only 1 in this version."""
    pipeline_parallel_degree: int = 1
    """Stages of consecutive layers; only 1 in this version."""
    expert_parallel_degree: int = 1
    """Ranks that share the experts; only 1 in this version."""
    context_parallel_degree: int = 1
    """Ranks that share each sequence; training.seq_len must divide by it (by twice it with headtail)."""
    context_parallel_method: Literal["ring", "gather", "auto"] = "ring"
    """How attention sees the other ranks' tokens; ring: block by block, partial results are merged; gather: all keys
    and values in order, so that the forward's bits do not depend on the degree; auto: by heads, nodes and device."""
    context_parallel_rotate_method: Literal["allgather", "alltoall"] = "allgather"
    """How the ring moves keys and values: all at once, or one hop per block."""
    context_parallel_ulysses_degree: int = 1
    """Ranks of each cp group that exchange tokens for heads (Ulysses) around the method, which runs over the others; a
    divisor of context_parallel_degree and of the query heads. 1: off; the whole degree: no other method runs."""
    context_parallel_gather_kv_heads: int | Literal["auto"] = "auto"
    """Key/value heads that method gather moves at a time, 1 or more, while those before are computed: bounds its extra
    memory; 0: all at once; auto: as many as 16 MiB hold, at least 1."""
    context_parallel_keep_gathered: bool = False
    """Method gather keeps all keys and values of a layer for its backward, instead of gathering them again."""
    context_parallel_load_balancer: Literal["auto", "headtail", "none", "per_document", "ptrr", "greedy"] = "auto"
    """How attention becomes equal work; headtail: each rank gets an early and a late chunk; none: one contiguous chunk;
    per_document: headtail inside each document; greedy: blocks by what their masks cost, those of a document together;
    ptrr: torch's round-robin of blocks; auto: headtail for plain causal masks, greedy for others."""


@dataclass(frozen=True)
class ActivationCheckpoint:
    """Memory of activations against computing."""

    mode: Literal["none", "selective", "full"] = "none"
    """none: keep all activations; full: keep each layer's input and compute the rest again in the backward; selective:
    as selective_ac_option says."""
    selective_ac_option: str = "op"
    """For mode selective. op: keep attention, communication and every second matrix product, compute the rest again; a
    number N, 1 or more: every N-th layer is full, the others none."""


@dataclass(frozen=True)
class Compile:
    """torch.compile, one layer at a time."""

    enable: bool = False
    """Compile each layer, once for all."""
    backend: Literal["inductor", "aot_eager"] = "inductor"
    """inductor: fused kernels, made by a C++ compiler on a CPU; aot_eager: torch's own, traced only, for debugging."""


@dataclass(frozen=True)
class Checkpoint:
    """Saving and loading the state of the run."""

    enable: bool = False
    """Load at the start; save every `interval` steps, at the last step and on a stop signal."""
    folder: str = "checkpoint"
    """Folder of the step-N folders, below job.dump_folder."""
    interval: int = 500
    """Steps between two checkpoints; 1 or more."""
    load_step: int = -1
    """Step to resume from, 0 or more; -1: the newest complete one, if any."""
    create_seed_checkpoint: bool = False
    """Save the initial state as step-0 and exit; in one process."""
    initial_load_path: str = ""
    """A step-N folder whose weights alone are loaded where there is nothing to resume; the run starts at step 0."""
    load_only: bool = False
    """Load, and never save."""


@dataclass(frozen=True)
class Metrics:
    """What is reported, and where."""

    log_freq: int = 10
    """Steps between two reports; 1 or more. The first and the last step are always reported."""
    enable_tensorboard: bool = False
    """Write TensorBoard events below save_tb_folder."""
    enable_wandb: bool = False
    """Report to Weights & Biases too; needs the package wandb."""
    save_tb_folder: str = "tb"
    """Folder of TensorBoard events, below job.dump_folder."""
    disable_color_printing: bool = False
    """Never colour the console's lines."""


@dataclass(frozen=True)
class Profiling:
    """Traces of time and memory."""

    enable_profiling: bool = False
    """Write a trace of torch's profiler every profile_freq steps."""
    profile_freq: int = 10
    """Steps between two traces or snapshots; 1 or more."""
    save_traces_folder: str = "profile_traces"
    """Folder of the traces, below job.dump_folder."""
    enable_memory_snapshot: bool = False
    """Write a snapshot of CUDA's allocator every profile_freq steps; no effect on a CPU."""
    save_memory_snapshot_folder: str = "memory_snapshot"
    """Folder of the snapshots, below job.dump_folder."""


@dataclass(frozen=True)
class Comm:
    """Collectives between ranks."""

    init_timeout_seconds: int = 300
    """Seconds that a collective may take up to the end of the first step, and around checkpoints; 1 or more."""
    train_timeout_seconds: int = 100
    """Seconds that a collective may take in all other steps; 1 or more."""


@dataclass(frozen=True)
class Verify:
    """What `python -m torchtitan.verify` allows; nothing else reads it."""

    loss_tolerance: float | None = None
    """Largest difference of the loss, relative; 0 or more. None: by the precision (float64 1e-12, float32 1e-6,
    bfloat16 1e-3)."""
    gradient_tolerance: float | None = None
    """Largest difference of a parameter's gradient, relative to its largest element (at least 1e-3 of the largest of
    all parameters, where one is nearly 0); 0 or more. None: by the precision
    (float64 1e-12, float32 4e-6, bfloat16 5e-2)."""
    memory_limit_gib: float = 16.0
    """GiB that the model in one process may be estimated to need; a larger one is refused. Above 0."""


@dataclass(frozen=True)
class Debug:
    """Reproducibility."""

    seed: int = 0
    """The one seed, of weights and data order; 0 or more."""
    deterministic: bool = False
    """Use deterministic kernels only, and check at every step that the ranks of a cp group read the same data."""
