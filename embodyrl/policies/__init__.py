"""Policies: flow-matching vision-language-action models behind ``embodyrl.policy.Policy``."""
