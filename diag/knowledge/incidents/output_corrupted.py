"""Logits are NaN: responses are garbage, although the server looks healthy."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, documented, judged, measured, reported

NANS = "https://github.com/vllm-project/vllm/pull/27306"
FP8_KV = "https://github.com/vllm-project/vllm/issues/38652"
FLOAT16 = "https://github.com/vllm-project/vllm/issues/48231"

NO_SCALES = signals.kv_scales_missing.at_least(
    1, reported("an FP8 KV cache with scales of 1.0 turned answers into garbage, bfloat16 did not", FP8_KV)
)
CAST = signals.cast_to_float16.at_least(
    1, reported("all logits were NaN after a cast to float16, none in bfloat16", FLOAT16)
)
ONLY_HERE = signals.clean_peers.at_least(
    1, judged("the same model and settings are right elsewhere: the fault is in this server")
)
EVERY_REQUEST = signals.corrupted_share.above(
    0.95, judged("weights, quantization, a kernel or the GPU hurt every request; a prompt or an adapter only some")
)
incident = Incident(
    id="output_corrupted",
    title="Corrupted output (NaN in logits)",
    severity="warning",
    per=("instance", "engine"),
    cause="""
        A forward pass produces NaN, so that the next token is chosen from nothing: "!!!!", one token for ever, or text
        without sense. A kernel or an attention backend with a bug, a broken quantization or its scales, an overflow of
        float16, KV blocks that were read while others wrote them, damaged weights, or a faulty GPU. vLLM counts it only
        with VLLM_COMPUTE_NANS_IN_LOGITS=1; without it nothing on the page shows it. The counter does not name the
        cause. The log names a cast to float16 or missing scales, the driver a faulty GPU, and peers that answer well
        exclude the model and its settings; without any of these, only excluding one part at a time tells.
    """,
    impact="answers are garbage and end with HTTP 200, so neither latency nor errors show it",
    symptoms=(signals.requests_corrupted.above(0, measured("1 of 5 clients gets NaN; 0 before", "output_corrupted")),),
    supports=(NO_SCALES, CAST, ONLY_HERE, EVERY_REQUEST),
    escalates=signals.corrupted_share.above(0.05, judged("more than single requests")),
    looks_like=(
        LookAlike(
            "text without sense from valid logits",
            distinguish="A wrong chat template, sampling far from the model's own (temperature, top_p), or a weak "
            "quantization give strange text without any NaN: compare with /v1/completions at temperature 0.",
        ),
        LookAlike(
            "kv_transfer_failing",
            distinguish="A decode instance that reads KV blocks after they expired answers from another prompt's "
            "cache; its logits need not be NaN.",
        ),
        LookAlike("gpu_fault", distinguish="The driver reports an Xid error or uncorrected memory errors."),
    ),
    fixes=(
        Fix(
            flag="--dtype",
            value="bfloat16",
            only_if=(CAST,),
            change="Serve the model in the type that it was trained in: its activations overflow float16.",
            effect="corrupted requests stay at 0",
            risk="GPUs before compute capability 8.0 (T4, V100) have no bfloat16: float32 there, at half the speed",
            rollback="set the old --dtype again",
            why=CAST.why,
        ),
        Fix(
            flag="--kv-cache-dtype",
            value="auto",
            only_if=(NO_SCALES, signals.kv_cache_is_fp8.at_least(1, judged("only a quantized KV cache needs scales"))),
            change="Do not quantize the KV cache, or serve a checkpoint with k_scale and v_scale.",
            effect="corrupted requests stay at 0",
            risk="the KV cache holds half as many tokens",
            rollback="set the old --kv-cache-dtype again",
            why=NO_SCALES.why,
        ),
        Fix.without_restart(
            change="Send one prompt at temperature 0 with logprobs to this server and to a healthy one; NaN appears as "
            "null or as an error. Note which prompts, lengths and adapters are affected.",
            effect="it shows whether a prompt, an adapter, or everything is affected",
            why=documented("the counter of NaN does not identify the requests", NANS),
        ),
        Fix.without_restart(
            change="Check the weights (sha256 of the files against the source), the GPU's memory errors and "
            "`dcgmi diag -r 3`.",
            only_if=(ONLY_HERE,),
            effect="damaged weights or a faulty GPU are found",
            why=judged("both corrupt every request of one server, and of none of its peers"),
        ),
        Fix(
            change="Exclude one part at a time: another --attention-backend, --enforce-eager, --kv-cache-dtype auto, "
            "--no-enable-prefix-caching, no KV connector, no speculative decoding, --dtype bfloat16 for float16.",
            effect="corrupted requests stay at 0 with the part that is broken left out",
            risk="each of them may cost throughput while it is tried",
            why=judged("each of these has been the cause in public reports"),
        ),
    ),
    operations=("drain",),
    mitigate=("Take the server out of rotation: what it answers is not to be trusted.",),
    hand_over=(
        "a prompt that reproduces it with its parameters, the release of vLLM, the launch command, model and "
        "quantization, and whether a peer with the same weights answers it well",
    ),
    do_not=("Do not count on retries on the same server: blocks with NaN may be reused from its prefix cache.",),
)
