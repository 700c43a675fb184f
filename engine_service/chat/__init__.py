"""From a conversation to token ids and a grammar, and from the model's text to answers and tool calls."""
