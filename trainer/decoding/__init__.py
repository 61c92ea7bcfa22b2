"""Text from a trained model: prompts -> generated ids, by search over the next token's logits."""
