"""Declares and validates cases, and holds facts about models. Nothing is run here."""
