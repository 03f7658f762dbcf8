"""LangChain's own chat model for OpenAI, with this base URL: an answer as it is made.

pip install langchain-openai; python langchain_chat.py http://127.0.0.1:8000 smol "What is a kite?"
"""

import sys

from langchain_openai import ChatOpenAI

url, model, question = sys.argv[1:]
chat = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="any")
for chunk in chat.stream(question):
    print(chunk.text, end="", flush=True)
print()
