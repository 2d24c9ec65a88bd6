"""Grammars of structured outputs cannot be compiled, or refuse the tokens that the model generates."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, documented, judged, measured, reported

STRUCTURED = "https://docs.vllm.ai/en/latest/features/structured_outputs.html"
LIVELOCK = "https://github.com/vllm-project/vllm/issues/49210"
NO_BACKEND = "https://github.com/vllm-project/vllm/issues/51660"
FAILS = signals.grammar_errors_per_request.above(
    0.02, judged("one request in fifty; a single line in hours is a draft token or one client's schema")
)

incident = Incident(
    id="structured_output_failing",
    title="Structured output fails",
    severity="warning",
    per=("instance",),
    window="2m",
    hold="0s",
    immediate="three lines of the log and more within two minutes: the window is the wait",
    cause="""
        A grammar restricts the next token at each step. Where it refuses a token that was generated, vLLM ends
        the request with an error (older releases go on, without structure). It happens where other parameters of a
        request forbid every token that the grammar allows, and where grammar and tokens are out of step: with
        speculative decoding, asynchronous scheduling or a reasoning parser in some releases. A grammar that does not
        compile ends its request, and in older releases the engine.
    """,
    impact="requests with a schema, a tool or a choice end with HTTP 500 or with output that breaks the schema",
    symptoms=(FAILS,),
    looks_like=(
        LookAlike(
            "structured output that works",
            distinguish="The log has none of these lines, however many schemas there are.",
            refuted_by=FAILS,
        ),
        LookAlike(
            "schemas that are refused",
            distinguish="The client gets HTTP 400 at once, and no request reaches the engine.",
            refuted_by=FAILS,
        ),
        LookAlike("engine_stalled", distinguish="No token moves, and the log has none of these lines."),
    ),
    escalates=signals.MOST_FAIL,
    explains=("engine_dead", "engine_stalled", "requests_failing"),
    fixes=(
        Fix.without_restart(
            change="Look at the parameters of the requests that the log names: allowed_token_ids and bad_words must "
            "leave a token that the schema allows at every place.",
            command="grep -E 'Failed to (advance FSM|compile grammar) for request' {log}",
            effect="requests with a schema end with its output",
            why=measured(
                "allowed_token_ids without a token of any choice: each request failed", "structured_output_failing"
            ),
        ),
        Fix(
            change="Turn speculative decoding off until the release is upgraded: drafts and grammars are out of step "
            "in some releases (repaired bit by bit from 0.27.0 on).",
            effect="no line about a grammar any more",
            only_if=(
                signals.speculates.at_least(1, documented("only drafts can run ahead of the grammar", STRUCTURED)),
            ),
            risk="fewer tokens per step: outputs take longer",
            rollback="set --speculative-config again",
            why=reported("the engine went in circles with MTP drafts and xgrammar", LIVELOCK),
        ),
        Fix(
            flag="--structured-outputs-config",
            value='{"backend": "guidance"}',
            change="Try another backend for grammars; keep the other keys that are set.",
            effect="no line about a grammar any more",
            risk="backends differ in the schemas that they accept and in the white space that they allow",
            rollback="set the old backend again",
            why=reported("each backend fails in its own way: xgrammar out of step, outlines at compiling", NO_BACKEND),
        ),
    ),
    operations=("drain",),
    mitigate=("Route requests with a schema to another replica, and retry those that got HTTP 500.",),
    hand_over=("the schema and the parameters of a request that fails, its lines in the log, and the release",),
    do_not=("Do not restart the server for it alone: the same requests fail again.",),
)
