"""LiteLLM's calls, by the interfaces of OpenAI and of Ollama: `python litellm_models.py URL`."""

import base64
import sys

import litellm

litellm.suppress_debug_info = True
url = sys.argv[1]
openai = {"api_base": f"{url}/v1", "api_key": "any"}
asked = [{"role": "user", "content": "What is a kite?"}]
for model, place in (("openai/smol", openai), ("ollama_chat/smol", {"api_base": url}), ("ollama/smol", {"api_base": url})):
    whole = litellm.completion(model, asked, max_tokens=12, temperature=0, **place)
    assert whole.choices[0].message.content and whole.usage.completion_tokens == 12, whole
    parts = [*litellm.completion(model, asked, max_tokens=12, temperature=0, stream=True, **place)]
    assert (
        len(parts) > 2
        and "".join(part.choices[0].delta.content or "" for part in parts).strip() == whole.choices[0].message.content.strip()
    )
    try:
        litellm.completion(model, asked, temperature=9, **place)
    except (litellm.APIError, litellm.BadRequestError) as error:
        assert "must be at most 2" in str(error), error
    else:
        raise AssertionError(model)
assert litellm.responses("What is a kite?", "openai/smol", max_output_tokens=8, **openai).output[0].content[0].text
assert len(litellm.speech("openai/tts-1", "Good morning.", "alloy", **openai).content) > 1000
drawn = litellm.image_generation("a red circle on a blue background", "openai/gpt-image-1", **openai)
assert base64.b64decode(drawn.data[0].b64_json).startswith(b"\x89PNG")
