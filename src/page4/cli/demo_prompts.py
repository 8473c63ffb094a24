"""Prompts of `page4 demo`: written for it, so no checkpoint was trained on them."""

from __future__ import annotations

COUNTER = '''"""Count words in text files.

This module provides a small class that counts the words of a file and a
function that returns the most common ones.
"""

import collections
import re

_word_re = re.compile(r"[A-Za-z]+")


class WordCounter:
    """Count words, ignoring case."""

    def __init__(self, minimum_length=1):
        self.minimum_length = minimum_length
        self.counts = collections.Counter()

    def add_line(self, line):
        """Add the words of one line."""
        for word in _word_re.findall(line.lower()):
            if len(word) >= self.minimum_length:
                self.counts[word] += 1

    def add_file(self, path, encoding="utf-8"):
        """Add the words of every line of the file at *path*."""
        with open(path, encoding=encoding) as file:
            for line in file:
                self.add_line(line)

    def most_common(self, n=None):
        """Return a list of the *n* most common words and their counts.

        If *n* is None, all words are returned.  Words with equal counts
        are in the order in which they were first seen.
        """
        return self.counts.most_common(n)

    def __len__(self):
        """Return the number of different words."""
        return len(self.counts)

    def __contains__(self, word):
        return word.lower() in self.counts

    def __repr__(self):
        return "%s(%r)" % (self.__class__.__name__, self.minimum_length)


class WordCounterTest(unittest.TestCase):

    def test_empty(self):
        counter = WordCounter()
        self.assertEqual(len(counter), 0)
        self.assertEqual(counter.most_common(), [])

    def test_add_line(self):
        counter = WordCounter()
'''

PROMPTS = (
    COUNTER,
    """The "with" statement
********************

The "with" statement is used to wrap the execution of a block with
methods defined by a context manager. This allows common""",
    '''def read_table(path, separator=","):
    """Return the rows of a text file as a list of lists of strings.

    Empty lines are skipped.  If the file does not exist, an empty list is
    returned.
    """
    rows = []
    try:
''',
    '''class Stack:
    """A last-in, first-out collection of items."""

    def __init__(self, items=()):
        self._items = list(items)

    def push(self, item):
        """Add an item to the top of the stack."""
        self._items.append(item)

    def pop(self):
''',
)
