"""One tool loop with each official SDK, whole and as a stream, in a Python that has them. Prints what they
read, as JSON.
"""

import json
import sys


def main(url: str) -> None:
    import anthropic
    import openai

    schema = {"type": "object", "properties": {"path": {"type": "string"}}}
    tool = {"name": "ls", "description": "Lists."}
    question = {"role": "user", "content": "How many?"}
    told = {"anthropic": anthropic.__version__, "openai": openai.__version__}

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    flat = [{"type": "function", "strict": True, "parameters": schema, **tool}]
    keys = {"model": "tiny", "tools": flat, "temperature": 0}
    first = client.responses.create(input=[question], **keys)
    with client.responses.stream(input=[question], **keys) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_response()
    thought, text, call = first.output
    told["responses"] = [thought.content[0].text, first.output_text, call.name, json.loads(call.arguments)]
    told["responses stream"] = [
        streamed.output[0].content[0].text,
        streamed.output_text,
        streamed.output[2].name,
        json.loads(streamed.output[2].arguments),
    ]
    told["responses events"] = events
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "two"}
    told["responses end"] = client.responses.create(
        input=[question, *first.output, result], **keys
    ).output_text

    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    tools = [{"input_schema": schema, **tool}]
    keys = {"model": "tiny", "max_tokens": 300, "tools": tools, "extra_body": {"temperature": 0}}
    first = client.messages.create(messages=[question], **keys)
    with client.messages.stream(messages=[question], **keys) as stream:
        streamed = stream.get_final_message()
    for name, message in (("messages", first), ("messages stream", streamed)):
        thought, text, call = message.content
        told[name] = [thought.thinking, text.text, call.name, call.input, message.stop_reason]
    result = {"type": "tool_result", "tool_use_id": first.content[2].id, "content": "two"}
    loop = [question, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    last = client.messages.create(messages=loop, **keys)
    told["messages end"] = [last.content[0].text, last.stop_reason, last.usage.output_tokens]
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1])
