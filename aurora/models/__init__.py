"""transformers MoE models, and the only package that imports transformers.

- `loading`: loads models, finds their experts, and reduces experts modules to some of their experts
- `own_weights`: loads models without their experts, and single experts from the files
- `hub`: folders of models in the local Hugging Face cache, and digests
- `decoding`: greedy decoding, one forward pass at a time
- `prompts`: text, chats and token ids as prompts
"""
