"""transformers MoE models, and the only package that imports transformers.

- `loading`: loads models, finds their experts, keeps some of them
- `hub`: folders of models in the local Hugging Face cache
- `conventions`: how models call their experts
- `decoding`: greedy decoding, one forward pass at a time
- `prompts`: text, chats and token ids as prompts
"""
