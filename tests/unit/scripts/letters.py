"""A tokenizer for benchmarks of translation, where a text can be read off its token ids."""

END = 9


class Letters:
    """A tokenizer whose token ids are code points."""

    all_special_ids = (END,)

    def apply_chat_template(self, messages, *, add_generation_prompt, return_dict, enable_thinking):
        return [1, *map(ord, messages[0]["content"]), 2]

    def decode(self, token_ids, *, skip_special_tokens):
        return "".join(chr(t) for t in token_ids if not (skip_special_tokens and t == END))
