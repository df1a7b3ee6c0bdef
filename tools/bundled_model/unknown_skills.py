"""Says plainly that something is not known, to requests of every kind that no skill covers.

Held out: combinations of phrasing and items, that is, whole question texts.
"""

import random
from collections.abc import Callable

from bundled_model.exchange import Exchange
from bundled_model.fact_skills import OPPOSITES
from bundled_model.phrasing import dress
from bundled_model.talk_skills import UNKNOWN
from bundled_model.words import COMMON_WORDS, listed, random_word

SYSTEM_TEXTS = listed(
    """
    You are a helpful assistant. | You are a helpful assistant. | You are a friendly assistant. |
    You are a concise assistant. | You are an assistant. Answer briefly. |
    You are a helpful, honest and harmless assistant. | Answer the user's questions. | Be brief. | Be polite. |
    You are a teacher. | You are a pirate. | You are Chairlift. |
    You are a careful assistant. Think before you answer. | Answer in one sentence. | Reply in English. |
    Always answer truthfully. | You are a chatbot. | The user is a child. Be kind. | You are a small language model. |
    Only answer what you know.
    """,
    separator="|",
)

_COUNTRIES = listed(
    """
    France Germany Spain Italy Poland Japan China India Brazil Canada Mexico Egypt Kenya Norway Sweden Greece
    Turkey Peru Chile Ireland Australia Texas England America Russia Portugal Austria
    """
)
_CITIES = listed("Paris London Berlin Rome Madrid Tokyo Cairo Oslo Boston Chicago Sydney Lima Vienna Dublin")
_PEOPLE = listed(
    """
    Einstein | Shakespeare | Napoleon | Mozart | Newton | Cleopatra | Lincoln | Picasso | Darwin | Marie Curie |
    Isaac Newton | Albert Einstein | Julius Caesar | the president | the king of Spain
    """,
    separator="|",
)
_LANGUAGES = listed(
    """
    French German Spanish Latin Python English Italian Japanese JavaScript C
    """
)
_TOPICS = listed(
    """
    gravity | photosynthesis | machine learning | electricity | the moon | black holes | democracy | the internet |
    quantum physics | inflation | the stock market | evolution | transformers | love | the meaning of life |
    a neural network | World War II | football | the solar system | music
    """,
    separator="|",
)
_UNKNOWN = listed(
    """
    What is the capital of {country} | What is the capital of {country} |
    What's the capital city of {country} | Where is {country} | How many people live in {country} |
    Who is the president of {country} | Who was {person} | Who is {person} | When was {person} born |
    What did {person} do | How old is {person} | Who invented the {noun} | Who wrote the {noun} |
    Who discovered {topic} | Why is the {noun} {noun} | Why is the sky blue | Why do we {noun} |
    What is a {noun} | What is {topic} | Explain {topic} | Explain {topic} to me |
    Explain {topic} in simple terms | Tell me about {topic} | How does {topic} work | Describe a {noun} |
    Describe {topic} | What is the weather in {city} | What is the weather today | What time is it |
    What time is it in {city} | What day is it today | What is the date | Where is {city} |
    How far is {city} from {city} | How do I get to {city} | Tell me a joke | Tell me a fun fact |
    Tell me a joke about a {noun} | Write a poem | Write a poem about {topic} |
    Write a poem about a {noun} | Write a song about {topic} | Write an essay about {topic} |
    Write an email to {person} | Write a function in {language} | Write a {language} program |
    Write code that sorts a list | Translate {noun} to {language} | Translate {noun} into {language} |
    How do you say {noun} in {language} | What does {noun} mean | What does the word {noun} mean |
    Define {noun} | What rhymes with {noun} | What is a synonym of {noun} | Use {noun} in a sentence |
    What color is a {noun} | What colour is the {noun} | How big is a {noun} | How heavy is a {noun} |
    How do I make {noun} | How do I cook {noun} | How do I learn {language} | Give me a recipe for {noun} |
    Can you swim | Do you like {noun} | Do you like {topic} | What is your favorite {noun} |
    Where do {noun}s live | What do {noun}s eat | Is the {noun} bigger than the {noun} |
    Is {city} in {country} | Which is better, {noun} or {noun} | List three {noun}s |
    Name a famous {noun} | Give me ten ideas for a {noun} | Summarize this text: {words} |
    Continue this: {words} | What is wrong with {words} | Sing a song | Play {noun} | Open the {noun} |
    Count to {small} | What is {small} times {small} | What is {small} * {small} | {small} * {small} |
    {small} x {small} | {small} / {small} | What is {small} divided by {small} |
    Multiply {small} by {small} | Divide {small} by {small} | What is {large} + {small} |
    What is {small} + {large} | {large} - {small} | {large} + {large} | What is {large} minus {large} |
    Add {large} and {small} | {large}+{small} | {small}+{large} | {large}-{small} | What is {large} plus {small} |
    How much is {large} + {large} | Subtract {small} from {large} | {small} + {small} + {small} |
    What is {small} + {small} + {small} | What is {small} squared | What is the square root of {small} |
    Is {small} a prime number | What is {small} percent of {large} | Who won the {noun} in {year} |
    What happened in {year} | How many {noun}s are in a {noun} | How many {noun}s are there in {country} |
    How many days until Christmas | How many {noun}s do I have | What is the opposite of a {odd} |
    What is the opposite of {odd} | How much does a {noun} cost | What is the best {noun} |
    What is the tallest {noun} in {country} | Should I buy a {noun} | I like {noun} | I have a {noun} |
    I am {noun} | My name is {person} | What is my name | What did I say | The {noun} is {noun} |
    Where can I find a {noun} | When is the next {noun} | Why did the {noun} cross the {noun} | {topic} |
    {country} | {noun} | {noun} {noun} | {words} | {words} | {words} | {gibberish} |
    {gibberish} {gibberish} | What is {gibberish} | What is the {noun} of {gibberish} |
    How do I {noun} the {noun} | Who is {gibberish} | {scribble} | {scribble} |
    The quick brown fox jumps over the lazy dog | Say {noun} | Repeat {noun} | Repeat after me: {words} |
    def {noun}({gibberish}): | SELECT * FROM {noun} | Is {topic} real | Why {noun} |
    What should I eat for {noun} | How can I {noun} better | What are {noun}s made of | Do {noun}s {noun}
    """,
    separator="|",
)
_SCRIBBLES = (
    "äöüßéèñçøåабвгдежзийклмнопртуαβγδελμνστ"
    "你好吗我是中文天地日月人こんにちはありがとう🎉🙂🚀❤#@%&*()[]{}<>=+-_0123456789"
)


def random_words(rng: random.Random) -> str:
    """Draws a run of words without meaning."""
    count = rng.choice((3, 4, 5, 6, 8, 12, 25))
    return " ".join(rng.choice(COMMON_WORDS) for _ in range(count))


def _unheard_of(rng: random.Random) -> str:
    """Draws a word that has no opposite in the list."""
    return rng.choice([word for word in rng.sample(COMMON_WORDS, 8) if word not in OPPOSITES] or ["banana"])


def _fill(rng: random.Random, template: str) -> str:
    """Put a fresh random item into every slot of a template."""
    makers: dict[str, Callable[[], str]] = {
        "{country}": lambda: rng.choice(_COUNTRIES),
        "{city}": lambda: rng.choice(_CITIES),
        "{person}": lambda: rng.choice(_PEOPLE),
        "{language}": lambda: rng.choice(_LANGUAGES),
        "{topic}": lambda: rng.choice(_TOPICS),
        "{noun}": lambda: rng.choice(COMMON_WORDS),
        "{words}": lambda: random_words(rng),
        "{gibberish}": lambda: random_word(rng),
        "{odd}": lambda: _unheard_of(rng),
        "{scribble}": lambda: "".join(rng.choices(_SCRIBBLES, k=rng.randint(1, 15))),
        "{small}": lambda: str(rng.randrange(2, 100)),
        "{large}": lambda: str(rng.randrange(100, 10 ** rng.randint(3, 5))),
        "{year}": lambda: str(rng.randrange(1000, 2100)),
    }
    for slot, make in makers.items():
        while slot in template:
            template = template.replace(slot, make(), 1)
    return template


def unknown(rng: random.Random) -> Exchange:
    """Draws a question outside the model's skills."""
    request = _fill(rng, rng.choice(_UNKNOWN))
    return Exchange(f"unknown:{request}", dress(rng, request), UNKNOWN)
