"""What follows the decoder stack, the final norm and the language head: loaded alone, from the model's files."""
