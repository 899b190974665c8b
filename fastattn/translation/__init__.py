"""Translation with the Transformer: its model, tokenizer, data, training, search and evaluation."""
