"""What users write in a call: keywords, prompts and sampling parameters, completions to be scored."""
