"""The questions: plain questions whose answers are spoken, and one whose answer takes about six seconds."""

from __future__ import annotations

QUESTION = "What is a kite?"
"""Asked with max_tokens=SIX_SECONDS_TOKENS, so that every run makes the same amount of sound."""

SIX_SECONDS_TOKENS = 20

SPOKEN = (
    "Why is the sky blue?",
    "What is a kite?",
    "How do plants make food?",
    "Tell me about the moon.",
    "What is bread made of?",
    "How does a bicycle stay upright?",
    "Why do we sleep?",
    "What is a river?",
    "How do birds fly?",
    "Give me a tip for learning the guitar.",
    "What is the capital of France?",
    "Why is the sea salty?",
    "How many days are in a week?",
    "What is a volcano?",
    "Describe a forest in autumn.",
    "What do bees do?",
    "How is glass made?",
    "What is a computer?",
    "Tell me about cats.",
    "Why do leaves fall?",
    "What is the largest planet?",
    "How do I boil an egg?",
    "What is music?",
    "Why should I drink water?",
)
