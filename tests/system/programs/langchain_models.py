"""LangChain's models of OpenAI and of Ollama: `python langchain_models.py URL`."""

import sys

from langchain_ollama import ChatOllama, OllamaLLM
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

ASKED = "What is a kite?"


class AnimalFact(BaseModel):
    is_tall: bool


url = sys.argv[1]
openai = ChatOpenAI(model="smol", base_url=f"{url}/v1", api_key="any", max_completion_tokens=12, temperature=0)
ollama = ChatOllama(model="smol", base_url=url, num_predict=12, temperature=0, validate_model_on_init=True)
for model in (openai, ollama):
    whole = model.invoke([("system", "Be brief."), ("user", ASKED)])
    assert whole.text and whole.usage_metadata and whole.usage_metadata["output_tokens"] == 12, whole
    parts = [*model.stream([("system", "Be brief."), ("user", ASKED)])]
    assert len(parts) > 2 and "".join(part.text for part in parts) == whole.text, parts
    more = model.invoke([("user", ASKED), whole, ("user", "Why?")])
    assert more.text, more
brief = "Is a giraffe tall? Answer in JSON."
for model in (openai, ollama):
    flag = model.with_structured_output(AnimalFact, method="json_schema").invoke(brief)
    assert isinstance(flag, AnimalFact), flag
assert OllamaLLM(model="smol", base_url=url, num_predict=8).invoke(ASKED)
for model in (openai, ollama):
    try:
        model.bind_tools([AnimalFact]).invoke(ASKED)
    except Exception as error:  # Each library has a class of its own for it.
        assert "tools: nothing here does that yet" in str(error), error
    else:
        raise AssertionError("tools were taken")
