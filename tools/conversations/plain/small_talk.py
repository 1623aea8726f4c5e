"""Greetings, thanks, questions about the model itself, and what a very small model cannot know.

Must not know: functions; where there are some, nothing here needs them.
"""

from __future__ import annotations

from conversations import words
from conversations.toolset import Talk
from conversations.words import LISTS

TOPICS = tuple((LISTS / "topics.txt").read_text(encoding="utf-8").splitlines())
GREETINGS = (
    "[Hi|Hello|Hey|Good morning|Good evening|Good afternoon][!|.|]",
    "[Hi|Hello] there[!|]",
    "[Hey|Hi], [are you there|is anybody there]?",
    "[hi|hello|hey]",
    "Hello, {name} here.",
    "[Moin|Servus|Ciao|Salut]!",
)
WELCOMES = (
    "[Hello|Hi]! [How can I help you|What can I do for you]?",
    "[Hello|Hi|Hello there]! What would you like to [know|do]?",
    "[Hello|Hi], nice to hear from you. How can I help?",
)
ABOUT = (
    "Who are you?",
    "What are you?",
    "[What|Which] model are you?",
    "What can you do?",
    "Are you [a human|a person|real|an AI]?",
    "[Can you help me|How can you help me]?",
    "What's your name?",
    "Tell me about yourself.",
    "Who made you?",
    "Are you ChatGPT?",
)
MYSELF = (
    "I'm the very small model that comes with apcbatch, to try it out. I can [talk about what you tell me|answer "
    "simple "
    "questions about what you tell me] and call functions.",
    "I'm a very small language model, made for trying out apcbatch. [Ask me about something that you tell me|I know "
    "little, "
    "but I can work with what you tell me].",
)
QUESTIONS = (
    "What is {topic}?",
    "Tell me [about|something about|more about] {topic}.",
    "Explain {topic}[| to me][| in simple words].",
    "[Can|Could] you [explain|tell me about] {topic}?",
    "What do you know about {topic}?",
    "Why is {topic} interesting?",
    "Write [an essay|a poem|a story|a short text|a song|a limerick] about {topic}.",
    "[Do you know|Have you heard of] {topic}?",
    "What do you think about {topic}?",
    "Give me [three facts|a fact|an example] about {topic}.",
    "I want to learn about {topic}.",
    "Summarise {topic}.",
    "Where can I read about {topic}?",
    "What's the [best|easiest] way to learn about {topic}?",
)
NAMED = (  # somebody or some place
    "Tell me [about|something about|more about] {topic}.",
    "What do you know about {topic}?",
    "[Do you know|Have you heard of] {topic}?",
    "What can you tell me about {topic}?",
    "Who or what is {topic}?",
    "I have a question about {topic}.",
)
IGNORANCE = (
    "I'm a very small model and don't know [enough|much] about {topic}. [Tell me something about it, and I can answer "
    "questions "
    "about that.|If you give me a text about it, I can answer questions about the text.]",
    "I'm sorry, I can't tell you [anything reliable|much] about {topic}: I'm too small a model to know it.",
    "I don't know [enough|much] about {topic}, I'm sorry. I can only work with what you tell me.",
)
WISHES = (
    "Tell me a joke.",
    "Sing a song.",
    "What's the weather like[ today|]?",
    "What time is it?",
    "What day is it[ today|]?",
    "Write some code.",
    "Translate this into French.",
    "Make me laugh.",
    "What should I cook[ tonight|]?",
    "What is the meaning of life?",
    "Who won the game?",
    "What is {name}'s phone number?",
    "How much does a flight to {town} cost?",
    "How do I get to {town}?",
    "When does the next bus to {town} leave?",
    "Write a [python|bash|JavaScript] script[ for me|].",
    "Where does {name} {family} live?",
    "Book me a table in {town}.",
    "Call {name}.",
    "Send {name} an e-mail.",
    "Play some music.",
    "Who is {name} {family}?",
    "What's on the news?",
    "Is it going to rain in {town}?",
)
CANNOT = (
    "I'm sorry, I can't do that here: I have no function for it[| and I'm a very small model].",
    "I can't [find that out|know that|help with that] from here, I'm sorry. [Is there anything else|Can I help with "
    "something "
    "else]?",
    "I'm too small a model for that, I'm sorry. I can answer questions about what you tell me.",
)
PLEASANTRIES = (
    (("[Thanks|Thank you|Thanks a lot][!|.|]",), ("You're welcome[!|.]", "[Gladly|My pleasure][!|.]")),
    (("[Bye|Goodbye|See you|Good night][!|.|]",), ("[Goodbye|Bye|Take care]!", "Goodbye, and have a good day!")),
    (
        ("[|Hello, |Hi, ][how are you|how's it going|how are things][ today|]?",),
        ("I'm fine, thank you. How can I help you?", "Fine, thanks! What can I do for you?"),
    ),
    (("[OK|Okay|Good|Great|I see|Nice][.|!|]",), ("[Is there anything else|Can I help with anything else]?",)),
    (
        ("[You're wrong|That's wrong|No][.|!|]",),
        ("I'm sorry. What should it be?", "I'm sorry about that. Could you tell me what is right?"),
    ),
    (("[test|testing|Test|1 2 3]",), ("[I'm here|It works]. How can I help you?",)),
    (
        ("[Help|Help me|I need help|Hey, can you help me|Hi, I have a question][!|.|]",),
        ("[Gladly|Of course]. What is it about?", "What can I help you with?"),
    ),
    (
        ("[asdf|qwerty|???|hm|lorem ipsum|foo bar]",),
        ("I'm sorry, I didn't understand that. Could you say it in other words?",),
    ),
)


STATUS = (  # what would have to be looked up, and how its number looks
    ("order", "A-8"),
    ("order", "8999"),
    ("order", "AA-999"),
    ("parcel", "AA99999"),
    ("booking", "AAA999"),
    ("invoice", "8999-9"),
    ("ticket", "A-899"),
    ("case", "89999"),
    ("delivery", "D-999"),
    ("refund", "R-8999"),
    ("repair", "899"),
    ("claim", "C-899"),
)
LOOK_UPS = (
    "[Where is|What is the state of|What about] my {what} {number}?",
    "[Has my {what} {number}|Has {what} {number}] [been sent|arrived]?",
    "When [will my|does my] {what} {number} come?",
    "[Please check|Can you check] my {what} {number}{mark}",
)
UNSEEN = (
    "I can't look up {what} {number}[ from here|], I'm sorry: I have no function for it.",
    "I'm sorry, I can't see {what} {number} from here.",
    "I don't know: I can't look up {number} here.",
)


def look_up(talk: Talk) -> None:
    """Where an order is, asked of a model that can look up nothing."""
    rng = talk.rng
    what, pattern = rng.choice(STATUS)
    number, other = words.code(rng, pattern), words.code(rng, pattern)
    mark = rng.choice((".", "?"))
    talk.user(*LOOK_UPS, what=what, number=number, mark=mark)
    talk.say(*UNSEEN, what=what, number=number)
    if talk.chance(0.4):
        talk.user("And {other}?", "[What about|And where is] {other}?", other=other)
        talk.say("I can't look up {other} either, I'm sorry.", "I can't see {other} from here either.", other=other)


def greet(talk: Talk) -> None:
    """Hello."""
    talk.user(*GREETINGS, name=words.given_name(talk.rng))
    talk.say(*WELCOMES)


def about(talk: Talk) -> None:
    """What it is."""
    talk.user(*ABOUT)
    talk.say(*MYSELF)


def ask(talk: Talk) -> None:
    """A question about the world."""
    topic = talk.rng.choice(TOPICS)
    if talk.chance(0.4):
        topic = talk.rng.choice(
            (
                words.town(talk.rng),
                words.family_name(talk.rng),
                f"{words.given_name(talk.rng)} {words.family_name(talk.rng)}",
            )
        )
    talk.user(*QUESTIONS, topic=topic)
    talk.say(*IGNORANCE, topic=topic)


def wish(talk: Talk) -> None:
    """Something that would need the world."""
    rng = talk.rng
    talk.user(*WISHES, name=words.given_name(rng), family=words.family_name(rng), town=words.town(rng))
    talk.say(*CANNOT)


def pleasantry(talk: Talk) -> None:
    """Thanks, goodbye, and what else is said."""
    said, answers = talk.rng.choice(PLEASANTRIES)
    talk.user(*said)
    talk.say(*answers)
