"""Makes small talk: greetings, thanks, goodbyes, and questions about the model itself.

Held out: whole question texts, marks and capitals included, since each kind has only a few dozen of them.
"""

import random

from bundled_model.exchange import Exchange
from bundled_model.phrasing import lower_first
from bundled_model.words import listed

_CAN_DO = (
    "do sums below 100, spell and reverse words, count letters, tell days, months and opposites, "
    "and tell very short stories."
)
ABILITIES = f"I can {_CAN_DO}"
UNKNOWN = f"I don't know that. {ABILITIES}"
IDENTITY = "I am the small model bundled with Chairlift. Ask me what I can do."
FIXED_ANSWERS = frozenset((ABILITIES, UNKNOWN, IDENTITY))

_SMALL_TALK: dict[str, tuple[str, ...]] = {
    "Hello! How can I help you?": listed(
        """
        Hello | Hi | Hey | Hello there | Hi there | Hey there | Good morning | Good evening | Good afternoon |
        Greetings | Howdy | Hello world | Hello model | Hello Chairlift | Yo | Hiya | Hello again | Nice to meet you |
        Is anyone there | Are you there | Test | Testing | Ping
        """,
        separator="|",
    ),
    IDENTITY: listed(
        """
        Who are you | What are you | What is your name | What's your name | Introduce yourself |
        Tell me about yourself | What model are you | Which model is this | Who am I talking to | Are you a robot |
        Are you human | Are you a person | Which model are you | What do I call you | Who made you |
        What is Chairlift | Say something about yourself | Are you an AI | Are you ChatGPT | Hello, who are you |
        Hi, what are you
        """,
        separator="|",
    ),
    ABILITIES: listed(
        """
        What can you do | Help | Help me | What do you know | What are you able to do | Can you help me |
        What can I ask you | What should I ask you | How can you help me | What are your skills |
        Tell me what you can do | What are you good at | What do you do | Show me what you can do | List your skills |
        I need help | Hello, what can you do | What else can you do
        """,
        separator="|",
    ),
    "I am well, thank you. How can I help you?": listed(
        """
        How are you | How are you doing | How do you do | How is it going | How are you today | How do you feel |
        Are you well | Hello, how are you | Hi, how are you | Hey, how are you doing | What's up | How have you been
        """,
        separator="|",
    ),
    "You are welcome!": listed(
        """
        Thanks | Thank you | Thank you very much | Thanks a lot | Many thanks | Thank you so much |
        Thanks for your help | Great, thanks | Cheers | That was helpful | Good job | Well done | Perfect, thank you |
        Nice | Great | Cool | OK | OK, thanks | Awesome | Very good
        """,
        separator="|",
    ),
    "Goodbye!": listed(
        """
        Bye | Goodbye | See you | See you later | Bye bye | Good night | See you tomorrow | Farewell | I have to go |
        Bye, thanks | Take care | That is all | I am leaving now | Until next time
        """,
        separator="|",
    ),
}
_MARKS = ("", ".", "!", "?", "!!", "...")


def small_talk(rng: random.Random) -> Exchange:
    """Draws a greeting, thanks, a goodbye, or a question about the model itself."""
    answer = rng.choice(sorted(_SMALL_TALK))
    request = rng.choice(_SMALL_TALK[answer])
    if rng.random() < 0.4:
        request = lower_first(request)
    elif rng.random() < 0.05:
        request = request.upper()
    question = request + rng.choices(_MARKS, weights=(30, 15, 20, 25, 5, 5))[0]
    return Exchange(f"talk:{question}", question, answer)
