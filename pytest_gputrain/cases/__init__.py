"""Declaring and validating cases, and facts about models. Nothing is run here."""
