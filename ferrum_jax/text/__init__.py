"""Text: a checkpoint's own tokenizer and chat template, and streams of text with stop strings. No jax."""

from ferrum_jax.text.chat import ChatTemplate, require_chat_template
from ferrum_jax.text.stream import TextStream
from ferrum_jax.text.tokenizer import Tokenizer, require_tokenizer
