"""The tool-call parser finds no call in any answer: it may not fit the model, so that calls end up in the text."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, documented, judged, measured

TOOLS = "https://docs.vllm.ai/en/latest/features/tool_calling/"
COUNTER = "https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/parser/metrics.py"

incident = Incident(
    id="tool_calls_unparsed",
    title="Tool-call parser finds no call",
    severity="info",
    per=("instance",),
    live_window="30s",
    hold="1h",
    cause="""
        Each model family writes tool calls in a form of its own, and --tool-call-parser names the form that vLLM looks
        for. A parser of another form finds nothing and leaves the call in the text of the answer, with HTTP 200 and
        without a line in the log; some raise an error, which is logged. Nothing tells it from clients that send no
        tools: several parsers search every answer.
    """,
    impact="none if clients send no tools; otherwise agents get the call as text, and do nothing or fail",
    symptoms=(
        signals.answers_without_tool_call.at_least(
            signals.ENOUGH_SEARCHED,
            judged("among {threshold} answers a model that calls tools has called one; no tool was needed in fewer"),
        ),
        signals.tool_calls_found.below(
            1, measured("0 calls in each answer with the wrong parser, the same answers else", "tool_calls_unparsed")
        ),
    ),
    supports=(signals.tool_parser_errors.above(0.02, documented("a parser that raises has found no call", COUNTER)),),
    looks_like=(
        LookAlike(
            "clients without tools",
            distinguish="The counter cannot tell them: ask for one call, as below.",
        ),
        LookAlike(
            "structured_output_failing",
            distinguish='With tool_choice "required" or a named tool, a grammar writes the call: no parser is asked.',
        ),
    ),
    fixes=(
        Fix.without_restart(
            change='Ask for a call that the model has to make, with tool_choice "auto", and read the answer: if '
            "`content` holds the call and `tool_calls` is empty, the parser does not fit.",
            command="curl -s http://SERVER/v1/chat/completions -H 'Content-Type: application/json' -d '{\"model\": "
            '"MODEL", "messages": [{"role": "user", "content": "Weather in Paris? Use the tool."}], "tools": '
            '[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": '
            '{"city": {"type": "string"}}}}}]}\'',
            effect="it tells a parser that does not fit from clients without tools",
            why=documented("the parser is asked for each answer of such a request", TOOLS),
        ),
        Fix(
            change="Set --tool-call-parser to that of the model's family, as vLLM's table of models has it, and its "
            "--chat-template if the table names one.",
            effect=f'`outcome="tool_call"` of {signals.TOOL_PARSES} grows',
            risk="clients that read calls out of the text get them in tool_calls",
            rollback="set the old parser again",
            why=documented("each parser reads the form of its models", TOOLS),
        ),
    ),
    operations=("log",),
    mitigate=("If agents fail, route requests with tools to a replica whose parser fits.",),
    hand_over=("one answer with the call in its text, --tool-call-parser, --chat-template, the model and the release",),
)
