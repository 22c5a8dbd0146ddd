"""The one room that knows transformers: loading MoE models, finding their experts, decoding greedily."""
