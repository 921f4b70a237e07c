"""Prompts: real passages, shared prefixes (system prompt and document), questions that differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEXTS = Path(__file__).parent / "texts"

SYSTEM = (
    "You are a careful reader who helps people to understand texts from earlier centuries. You are given one "
    "passage and one question about it. Answer in plain modern English, in two or three short sentences, and say "
    "nothing that the passage does not support. If the passage does not answer the question, say so. Quote a few "
    "words of the passage where that helps, and never use a list."
)

QUESTIONS = (
    "What is this passage about?",
    "Who is speaking here, and to whom? Name the words that tell you.",
    "Which single sentence matters most in this passage, and why did you choose that one?",
    "What does the writer want the reader to feel?",
    "Retell the first sentence of the passage in your own words.",
    "What will probably happen next? Give one reason that you find in the passage.",
    "Which word in the passage would a child not know today? Explain it.",
    "How does the passage end?",
)


def conversations(count: int) -> list[list[dict[str, str]]]:
    """``count`` chats over all documents. Each document comes back with another question after all others had a turn,
    so that a small pool has often dropped its blocks by then."""
    documents = [path.read_text(encoding="utf-8").strip() for path in sorted(TEXTS.glob("*.txt"))]
    most = len(documents) * len(QUESTIONS)
    if not 1 <= count <= most:
        raise ValueError(f"the demo has between 1 and {most} prompts, asked for {count}")
    chats = []
    for number in range(count):
        turn, document = divmod(number, len(documents))
        user = f"{documents[document]}\n\nQuestion: {QUESTIONS[turn]}"
        chats.append([{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}])
    return chats


def token_prompts(tokenizer: Any, count: int) -> list[list[int]]:
    """The chats through the model's own chat template, as token ids."""
    prompts = []
    for chat in conversations(count):
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        prompts.append([int(token) for token in tokenizer.encode(text, add_special_tokens=False)])
    return prompts
