"""Memory of a run by part and phase, in bytes. Each formula is one function; :func:`memory` sums them.

Letters: N weights, of them N_l in linear layers and N_t trained; V vocabulary, H hidden, F intermediate, L layers,
A = heads x head size, K = key-value heads x head size; T tokens of a micro-batch, R of them read by the head,
S rows decoded at once, P longest prompt, C longest completion; b bytes of a number in products, 4 or 2.

Always kept: weights, optimizer state, usually the reference, and a teacher (4 bytes a weight, 2 in bfloat16). In
addition, one phase at a time:

loading     the file's pages, where its numbers are converted (float32 is used as it is, page by page)
generating  weights laid out for products, cache of keys and values, the work of one step
evaluating  the same for an evaluation, if that needs more: it may decode more rows, or longer ones
training    gradients, activations, the head's work
exporting   a merged copy of the weights, if there are adapters
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config import Config
from ..learner.fused_head import BLOCK, at_once
from ..models.planning import Planning
from .passes import BytesByDepth, CriticLoad, Pass, Static
from .sizes import FOUR_BIT, Sizes

CHUNK = 1 << 22
"""Bytes by which the CPU decoder's paged cache grows."""
GAPS = 0.5
"""Gaps between tensors in the C library's heap on a CPU, as a share of what the layers allocate in a training pass
through the model's own forward; 0 to 0.6 was measured (`benchmarks/plan.py`)."""


WHOLE_STEP = 64
"""Bytes of a token while the coefficients of a whole optimizer step are computed at once: up to 14 numbers of it."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes by phase and part on the computing device; ``aside`` are bytes in CPU memory, where that is separate."""

    parts: dict[str, dict[str, int]]
    aside: int = 0

    def total(self, phase: str) -> int:
        return sum(self.parts[phase].values())

    @property
    def peak(self) -> int:
        return max(map(self.total, self.parts))

    @property
    def peak_phase(self) -> str:
        return max(self.parts, key=self.total)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How much is worked on at once (micro-batch and rows), and by which code.

    ``body`` is the measured need of the largest micro-batch's training pass, where the model's own forward runs
    (:mod:`.passes`): below the head, or with it where logits are made for all tokens. None means our kernels, whose
    needs the formulas give. ``prefill`` likewise.
    """

    tokens: int  # T
    reads: int  # R
    passes: int  # micro-batches of an optimizer step, of a rank
    rows: int  # S
    sequences: int  # that are sampled before anything is learned
    prompt: int  # P
    completion: int  # C
    group: int
    shares: bool  # a group's prompt is computed once
    fused: bool  # the head chunk by chunk
    packed: bool  # products by the compiled kernels
    reference: bool
    rounded: bool  # the reference keeps its linear layers in bfloat16
    teacher: int = 0  # bytes of a teacher's weights
    heap: bool  # memory comes from the C library and not from a GPU
    native_decode: bool
    body: Pass | None = None
    prefill: BytesByDepth | None = None
    plan: Planning | None = None  # of the backend, if there is one
    static: Static | None = None  # generation on a GPU by our decoder
    free: int | None = None  # bytes available for the whole run
    stored: int = 0  # bytes of the model's files
    types: frozenset[str] = frozenset()  # of the stored tensors, where known
    step_tokens: int = 0  # of an optimizer step that the objective must see at once; 0: it need not
    critic: CriticLoad | None = None  # a second model that is trained beside the policy
    process: int = 0  # Python, torch and everything else loaded before the model
    evaluation: Load | None = None  # the same with what an evaluation decodes, if that may need more than a step


# ---- kept all the time


def weights(s: Sizes, config: Config) -> int:
    """4 N; with adapters 4 (N - N_l) + b_base N_l + 4 N_t, b_base = 4, 2, or 9/16 in nf4."""
    if not config.lora.rank:
        return 4 * s.weights
    per_weight = {"float32": 4, "bfloat16": 2, "nf4": FOUR_BIT}[config.lora.base]
    return 4 * (s.weights - s.linear + s.trained) + int(per_weight * s.linear)


# Bytes a weight: two moments in float32; or in one byte each, with a float32 scale for every 256 numbers of both.
_MOMENTS = {"adamw": 8, "adamw-8bit": 2 + 8 / 256, "adamw-offload": 0}


def optimizer(s: Sizes, config: Config) -> int:
    """8 N_t; in 8 bits (2 + 8 / 256) N_t."""
    return int(_MOMENTS[config.learner.optimizer] * s.trained)


def critic(config: Config, load: Load) -> int:
    """4 N of the critic and its optimizer's 8 N (in 8 bits (2 + 8 / 256) N), if there is one: it trains all of its
    weights."""
    return 0 if load.critic is None else int((4 + _MOMENTS[config.learner.optimizer]) * load.critic.weights)


def reference(s: Sizes, config: Config, load: Load) -> tuple[int, int]:
    """Generating and training: 4 N, if there is a reference and no adapters that could be switched off. In bfloat16
    4 (N - N_l) + 2 N_l. As pages of files, unless it is updated, only while they are read, by the kernels layer by
    layer: 4 (N - N_l) + 4 N_l / L."""
    if not load.reference or config.lora.rank:
        return 0, 0
    if config.learner.reference_every:
        return 4 * s.weights, 4 * s.weights
    if load.rounded:
        rounded = 4 * s.weights - 2 * s.linear
        return rounded, rounded
    # Only float32 files on a CPU can serve as they lie, as mapped pages.
    if not load.heap or load.types != {"F32"}:
        return 4 * s.weights, 4 * s.weights
    by_layer = 4 * (s.weights - s.linear + s.linear // s.layers)
    return 0, 4 * s.weights if load.body is not None else by_layer


# ---- generating


def laid_out(s: Sizes, config: Config, load: Load) -> int:
    """b N_l + 4 V H: the weights laid out for products, the head's in float32. The model's own forward: b N_l + b V H,
    without 4-bit weights. On a GPU as its buffers are, without keys and values: copies of what is not in float32 and
    single as it is, and logits."""
    b, lora = _width(config), config.lora.rank
    if load.static is not None:
        return load.static.buffers.layer * s.layers + load.static.buffers.rest - cache(s, config, load)
    if load.native_decode:
        return b * s.linear + 4 * s.head
    if not load.packed:
        return 0
    # A base in fewer bytes is not laid out; adapters always are.
    mine = s.linear if not lora or config.lora.base == "float32" else 0
    # b N_l + b V H, and the adapters.
    return b * (mine + s.head + (s.trained if lora else 0))


def cache(s: Sizes, config: Config, load: Load) -> int:
    """2 L K b bytes a token: pages of 32 tokens, a prompt's once for its group, up to a whole chunk.

    The model's own forward: 2 L K b bytes for each row, prompt and completion side by side, and 64 columns. On a GPU
    rows and columns up to the next bucket, and one row more. Elsewhere the rows of as many episodes are held beside
    those that are decoded, until their environments have answered.
    """
    token = 2 * s.layers * s.kv_heads * s.head_dim
    if load.static is not None:
        return load.static.cache.layer * s.layers + load.static.cache.rest
    if not load.native_decode or load.plan is None:
        return token * _width(config) * _rows_kept(config, load) * (load.prompt + load.completion + 64)
    # S rows in sequence belong to at most ceil(S / G) + 1 groups: they may begin and end inside one.
    rows = _rows_kept(config, load)
    prompts = -(-rows // load.group) + 1
    pages = prompts * -(-load.prompt // load.plan.page) + rows * -(-load.completion // load.plan.page)
    page = _width(config) * token * load.plan.page
    # The cache grows by chunks of whole pages.
    chunk = max(1, CHUNK // page) * page
    return -(-pages * page // chunk) * chunk


def _rows_kept(config: Config, load: Load) -> int:
    return min(2 * load.rows, load.sequences) if config.plays else load.rows


def decoding(s: Sizes, config: Config, load: Load) -> int:
    """The larger of: 16 V S, logits and the three copies of their size that a draw makes; and the prefill of up to
    2,048 prompt tokens, each 4 H + b H (residual, norm), b (A + 2 K) + 4 A + b A (queries to attention's result),
    3 b F (gate, up, product), b (A + H) (what products gave)."""
    b, wide = _width(config), s.heads * s.head_dim
    # Logits and three copies, 4 bytes each.
    draw = 16 * s.vocabulary * load.rows
    if load.static is not None:
        return max(draw, load.static.work.layer * s.layers + load.static.work.rest)
    if load.prefill is not None:
        return max(draw, load.prefill.layer * s.layers + load.prefill.rest)
    assert load.plan is not None
    tokens = min(load.plan.prefill_tokens, load.prompt * (-(-load.rows // load.group)))
    # Of a prompt's token: residual and norm, queries to attention's result, gate, up and their product.
    row = (4 + b) * s.hidden + b * (2 * wide + 2 * s.kv_heads * s.head_dim) + 4 * wide + 3 * b * s.intermediate
    return max(draw, tokens * (row + b * s.hidden))


# ---- training


def gradients(s: Sizes) -> int:
    """4 N_t."""
    return 4 * s.trained


def critic_gradients(load: Load) -> int:
    """4 N of the critic, if there is one. They are gone before the policy's are computed."""
    return 0 if load.critic is None else 4 * load.critic.weights


def critic_pass(load: Load) -> int:
    """What was counted of a critic's pass, and on a CPU the gaps that its layers leave in the heap. It always runs its
    own forward, also beside a policy that runs by our kernels, whose memory lies apart."""
    one = load.critic
    return 0 if one is None else one.activations + (int(GAPS * one.layered) if load.heap else 0)


def low_copies(s: Sizes, config: Config, load: Load) -> int:
    """2 V H for the head, while it works in bfloat16 on a GPU; the kernels cast weights on the way."""
    return 2 * s.head if config.learner.dtype == "bfloat16" and load.fused and not load.heap else 0


def saved_activations(s: Sizes, config: Config) -> int:
    """Of a token between forward and backward pass, by layer: 8 H (the residual at its beginning and its middle),
    b (2 A + 2 K) (q, k, v, attention's result), 2 b F (gate, up), 4 per head (normalisers)."""
    b, wide = _width(config), s.heads * s.head_dim
    return 8 * s.hidden + b * (2 * wide + 2 * s.kv_heads * s.head_dim) + 2 * b * s.intermediate + 4 * s.heads


def work(s: Sizes, config: Config) -> int:
    """Of a token, whatever the number of layers: 8 H (the last residual, and its gradient), b (F + 5 H + A) (the gated
    product, a norm and what is added to the residual, three gradients of a norm, that of attention), 8 A + 24 K
    (queries, keys and values turned, and their gradients, those of a prompt twice)."""
    b, wide, narrow = _width(config), s.heads * s.head_dim, s.kv_heads * s.head_dim
    return 8 * s.hidden + b * (s.intermediate + 5 * s.hidden + wide) + 8 * wide + 24 * narrow


def layers(s: Sizes, config: Config, load: Load) -> BytesByDepth:
    """By our kernels: T kept a layer, T work and 4 2^20 (numbers packed for a weight's gradient) besides; with gradient
    checkpointing 4 T H a layer, and T kept besides once, since one layer at a time is computed again."""
    layer, rest = (
        load.tokens * saved_activations(s, config),
        load.tokens * work(s, config) + (load.plan.scratch if load.plan is not None else 0),
    )
    if config.learner.gradient_checkpointing:
        return BytesByDepth(4 * load.tokens * s.hidden, layer + rest)
    return BytesByDepth(layer, rest)


def body(s: Sizes, config: Config, load: Load) -> int:
    """All layers and the rest, besides gradients. By our kernels L layers and rest.

    The model's own forward: the larger of what was counted until the backward pass reaches the first layer and from
    there on; in 4 bits also b bytes for each weight of the largest matrix, which is unpacked for its product. With a
    single micro-batch gradients are among what was counted, but for the head's where it works chunk by chunk: the 4 N_t
    that are counted as gradients are taken off.
    """
    if load.body is None:
        return _at(layers(s, config, load), s)
    four_bit = _width(config) * s.hidden * s.intermediate if config.lora.base == "nf4" else 0
    largest = max(_at(load.body.before, s), _at(load.body.after, s)) + four_bit
    if load.passes > 1:
        return largest
    before = 4 * s.head if load.fused and not config.lora.rank else 0
    return largest + before - gradients(s)


def _at(line: BytesByDepth, s: Sizes) -> int:
    return line.layer * s.layers + line.rest


def head(s: Sizes, config: Config, load: Load) -> int:
    """Chunk by chunk: n = max(128, 2^21 / V) rows, on a GPU 256, of 4 V (with bfloat16 2 V more, but by the kernels),
    12 H for each of the R rows that are read, and without the kernels 8,192 rows of the weight's gradient, where it is
    trained. Logits of all tokens belong to the body."""
    if not load.fused:
        return 0
    rows = min(at_once(s.vocabulary, gpu=not load.heap), load.reads)
    low = 2 if config.learner.dtype == "bfloat16" and not load.packed else 0
    block = 0 if config.lora.rank or load.packed else 4 * min(BLOCK, s.vocabulary) * s.hidden
    return (4 + low) * s.vocabulary * rows + 12 * s.hidden * load.reads + block


def proof(s: Sizes, config: Config, load: Load) -> int:
    """One sample through the model's own forward before the first step, with which faster code is compared: 4 V C (its
    logits), 4 (P + C) (3 F + 4 H) (the work of a layer), and 4 H F (a matrix) where weights are kept in fewer bytes."""
    # The run's own pass is the plain one: there is nothing to compare.
    if load.body is not None and not load.fused and not load.shares:
        return 0
    layer = 4 * (load.prompt + load.completion) * (3 * s.intermediate + 4 * s.hidden)
    unpacked = 4 * s.hidden * s.intermediate if config.lora.base != "float32" else 0
    return 4 * s.vocabulary * load.completion + layer + unpacked


def coefficients(load: Load, trained: dict[str, int]) -> int:
    """On a CPU, of an optimizer step of n tokens that the objective must see at once: 4 n while it is trained, and
    64 n before, as far as that is more than what the training takes later. A GPU's run has them in CPU memory.

    The pass over all micro-batches that gives the log-probs for it needs less than the one with gradients.
    """
    if not load.heap:
        return 0
    return 4 * load.step_tokens + _beyond(WHOLE_STEP * load.step_tokens, trained, load)


def update(s: Sizes, config: Config) -> int:
    """Temporary memory of the optimizer, which updates one parameter after another: 24 bytes a number in 8 bits, 8
    offloaded."""
    # ``largest`` and not the sum: each parameter's temporaries are released before the next one's are made.
    return {"adamw": 0, "adamw-8bit": 24, "adamw-offload": 8}[config.learner.optimizer] * s.largest


# ---- exporting


def merged(s: Sizes) -> int:
    """4 N_l."""
    return 4 * s.linear


# ---- all of it


def memory(s: Sizes, config: Config, load: Load) -> Memory:
    """Sums all parts of all phases."""
    always = _always(s, config, load)
    made = samplings(s, config, load)
    # Tensors being packed into 4 bits, several at once; the factor is measured.
    packing = 3 * s.linear if config.lora.base == "nf4" and config.lora.rank else 0
    trained = _trained(s, config, load)
    held = _kept(s, load, made, trained)
    kept, read = reference(s, config, load)
    parts = {phase: always | {"reference": kept} | made[phase] | held[phase] for phase in made}
    training = always | {"reference": read} | trained | held["training"]
    # The engine keeps its buffers while training if that leaves half of the GPU free, and releases them otherwise.
    if load.static is not None:
        for phase, made_for in made.items():
            if load.free is None or 2 * sum(parts[phase].values()) <= load.free:
                training |= {name: max(made_for[name], training.get(name, 0)) for name in ("laid out", "cache")}
    parts["training"] = training
    # In the order of a run, in which tables show phases.
    if load.stored:
        parts = {"loading": always | {"reference": kept, "optimizer": 0, "file": load.stored + packing}} | parts
    if config.lora.rank:
        parts["exporting"] = always | {"reference": kept, "merged": merged(s)}
    aside = 0
    if config.learner.optimizer == "adamw-offload":
        aside = 8 * s.trained + 2 * critic_gradients(load)
    return Memory(parts, aside)


def samplings(s: Sizes, config: Config, load: Load) -> dict[str, dict[str, int]]:
    """What sampling takes in a step, and in an evaluation if that is more. Servers have their own memory: see
    cluster.py."""
    if config.cluster.rollout != "embedded":
        return {"generating": dict.fromkeys(("laid out", "step", "cache"), 0)}
    made = {"generating": _sampling(s, config, load)}
    if load.evaluation is not None:
        evaluating = _sampling(s, config, load.evaluation)
        if sum(evaluating.values()) > sum(made["generating"].values()):
            made["evaluating"] = evaluating
    return made


def _sampling(s: Sizes, config: Config, load: Load) -> dict[str, int]:
    return {
        "laid out": laid_out(s, config, load),
        "step": decoding(s, config, load),
        "cache": cache(s, config, load),
    }


def _always(s: Sizes, config: Config, load: Load) -> dict[str, int]:
    """What is there in every phase."""
    parts = {"process": load.process, "weights": weights(s, config), "optimizer": optimizer(s, config)}
    if load.teacher:
        parts["teacher"] = load.teacher
    if load.critic is not None:
        parts["critic"] = critic(config, load)
    return parts


def _trained(s: Sizes, config: Config, load: Load) -> dict[str, int]:
    """What an optimizer step takes."""
    # The optimizer reuses the memory that activations held, unless those lay in a separate arena.
    apart = load.heap and load.body is None and update(s, config) > 0
    passing = body(s, config, load) if apart else max(body(s, config, load), update(s, config))
    parts = {
        "gradients": max(gradients(s), critic_gradients(load)),
        "copies": low_copies(s, config, load),
        "activations": passing,
        "head": head(s, config, load),
    }
    if apart:
        parts["update"] = update(s, config)
    if load.critic is not None:
        # One after the other in the same memory, but beside our kernels, which have an arena.
        beside = 0 if load.heap and load.body is None else passing + parts["head"]
        parts["critic pass"] = max(0, critic_pass(load) - beside)
    parts["coefficients"] = coefficients(load, parts)
    parts["proof"] = _beyond(proof(s, config, load), parts, load)
    return parts


def _beyond(size: int, trained: dict[str, int], load: Load) -> int:
    """What of the ``size`` of the first step's check, or of a step's coefficients, is more than a step later takes in
    the same memory.

    On a CPU with our kernels that memory is only the gradients and the optimizer's temporaries; the rest lies in
    :class:`.arena.Arena`.
    """
    apart = ("activations", "head") if load.heap and load.body is None else ()
    return max(size - sum(part for name, part in trained.items() if name not in apart), 0)


def _kept(s: Sizes, load: Load, made: dict[str, dict[str, int]], trained: dict[str, int]) -> dict[str, dict[str, int]]:
    """What a CPU process holds in each phase besides that phase's needs: memory that other phases took.

    The heap keeps weights laid out, the work of a step, gradients, the first step's check and the optimizer's
    temporaries. :class:`.arena.Arena` keeps the cache, the head laid out (or everything laid out, where few weights are
    trained), activations and logits. Where passes go through the model's own forward, each phase gives its memory back,
    and the heap has gaps. Before a model is exported all of it is given back.
    """
    none: dict[str, dict[str, int]] = {phase: {} for phase in (*made, "training")}
    if not load.heap:
        return none
    if load.body is not None:
        # Of the layers' many tensors: the logits and the gradients of head and embedding, one each, leave none.
        gaps = int(GAPS * load.body.before.layer * s.layers)
        # Those of a critic are in its pass.
        return none | {"training": {"gaps": max(0, gaps - trained.get("critic pass", 0))}}
    # ---- from the arena, and from the heap
    in_arena, in_heap = {"training": trained["activations"] + trained["head"]}, {}
    held = ("gradients", "coefficients", "proof", "update", "critic pass")
    in_heap["training"] = sum(trained.get(name, 0) for name in held)
    for phase, parts in made.items():
        apart = parts["laid out"] if 2 * s.trained < s.weights else 4 * s.head
        in_arena[phase] = parts["cache"] + (apart if load.native_decode else 0)
        in_heap[phase] = sum(parts.values()) - in_arena[phase]
    # Heap and arena each stay at their largest use so far: a phase's extra is what another one needed beyond its own.
    most = max(in_arena.values()) + max(in_heap.values())
    return {phase: {"kept": most - in_arena[phase] - in_heap[phase]} for phase in none}


def _width(config: Config) -> int:
    return 2 if config.learner.dtype == "bfloat16" else 4
