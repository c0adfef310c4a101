"""How the DeepSeek models of ``transformers`` are parallelised: one recipe per family."""
