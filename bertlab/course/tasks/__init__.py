"""Real tasks for chapter 7, offline: they are made from the documentation on this machine.

    task = library_of_paragraph()
    task.train[0]  # LabelledText(text="Return a copy of ...", label=2)
    task.labels    # ("matplotlib", "networkx", ...)

The same package versions give the same examples. Each task has a baseline that knows words and
nothing else: what a model is worth is what it does better.

| task | its baseline | the same examples from the hub, where cached |
| --- | --- | --- |
| `library_of_paragraph` | `tf_idf_baseline` | `sst2_examples` |
| `same_docstring` | `shared_words_baseline` | |
| `template_sentences`, `checked_sentences` | `word_list_baseline` | `conll_examples` |
| `questions_about_parameters` | `nearest_known_answer` | `squad_examples` |
"""

from bertlab.course.tasks.entities import (
    KINDS,
    TAGS,
    checked_sentences,
    template_sentences,
    unlabelled_sentences,
    word_list_baseline,
    words_of,
)
from bertlab.course.tasks.examples import (
    LabelledPair,
    LabelledText,
    Question,
    TaggedWords,
    Task,
    leaks,
    near_duplicates,
    without_near_duplicates,
)
from bertlab.course.tasks.hub import cached, conll_examples, squad_examples, sst2_examples
from bertlab.course.tasks.paragraphs import (
    library_of_paragraph,
    same_docstring,
    shared_words_baseline,
    tf_idf_baseline,
)
from bertlab.course.tasks.spans import nearest_known_answer, questions_about_parameters

__all__ = [
    "KINDS",
    "TAGS",
    "LabelledPair",
    "LabelledText",
    "Question",
    "TaggedWords",
    "Task",
    "cached",
    "checked_sentences",
    "conll_examples",
    "leaks",
    "library_of_paragraph",
    "near_duplicates",
    "nearest_known_answer",
    "questions_about_parameters",
    "same_docstring",
    "shared_words_baseline",
    "squad_examples",
    "sst2_examples",
    "template_sentences",
    "tf_idf_baseline",
    "unlabelled_sentences",
    "without_near_duplicates",
    "word_list_baseline",
    "words_of",
]
