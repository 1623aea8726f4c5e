"""Seeded mutation of everything that is read: each case ends soon, in bounded memory, in an answer or a sentence."""
