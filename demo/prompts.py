"""Prompts: real passages, shared prefixes (system prompt and document), questions that differ."""

import itertools
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


REMARKS = (
    "Thank you, that helps. Which of the old books you know would you read first, and why that one?",
    "I do not have a passage today. What should I look for when I read a text from 1776?",
    "Before we start: how long may a passage be, and what will you do with it?",
    "What is the difference between a novel and a speech?",
    "My teacher says that old spelling does not matter. Is that right?",
    "Tell me in one sentence what irony is.",
    "Can you explain what a waistcoat is?",
    "How do you know what a writer meant, when nobody can ask them?",
    "Please say in simple words what a proposition is.",
    "Which question should I always ask about a text?",
    "What does it mean that all men are created equal?",
    "Why did people write such long sentences two hundred years ago?",
    "What is a whale ship?",
    "Is it true that Sherlock Holmes never lived?",
    "What would you ask Jane Austen?",
    "Say goodbye to me as a character from an old book would.",
)


def conversations(count: int) -> list[list[dict[str, str]]]:
    """``count`` chats: two about a document, then a short one without, and so on.

    Each document comes back with another question after all others had a turn, so that a small pool has often dropped
    its blocks by then. The short chats fill the pool to the brim, so that a running request that grows finds no block
    and something has to be preempted."""
    documents = [path.read_text(encoding="utf-8").strip() for path in sorted(TEXTS.glob("*.txt"))]
    long_chats = (
        f"{document}\n\nQuestion: {question}" for question, document in itertools.product(QUESTIONS, documents)
    )
    short_chats = iter(REMARKS)
    most = min(len(documents) * len(QUESTIONS) * 3 // 2, len(REMARKS) * 3)
    if not 1 <= count <= most:
        raise ValueError(f"the demo has between 1 and {most} prompts, asked for {count}")
    users = [next(short_chats if number % 3 == 2 else long_chats) for number in range(count)]
    return [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}] for user in users]


def token_prompts(tokenizer: Any, count: int) -> list[list[int]]:
    """The chats through the model's own chat template, as token ids."""
    prompts = []
    for chat in conversations(count):
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        prompts.append([int(token) for token in tokenizer.encode(text, add_special_tokens=False)])
    return prompts
