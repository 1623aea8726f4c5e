"""Deeds at home and on the road: timers, messages, lights, tasks, music, taxis."""

from __future__ import annotations

from conversations import words
from conversations.everyday.deed import Deed, city, person, time
from conversations.toolset import INTEGER, Function, needs

ROOMS = ("kitchen", "bedroom", "living room", "office", "hall", "bathroom", "garage", "cellar")
TASKS = (
    "call the dentist",
    "water the plants",
    "buy milk",
    "pay the rent",
    "book a table",
    "send the invoice",
    "feed the cat",
    "pick up the parcel",
    "clean the oven",
    "write to {name}",
    "call {name}",
    "return the books",
    "renew the passport",
)
SONGS = ("Morning Tide", "Blue Lantern", "Slow Train", "Paper Boats", "Winter Garden", "Glass Hill", "Nine Bridges")

HOME: tuple[Deed, ...] = (
    Deed(
        Function(
            "set_timer|start_timer|timer",
            "Start a timer.|Count down some minutes.",
            {"minutes": needs("minutes|duration", "How many minutes.", INTEGER)},
        ),
        lambda rng: {
            "minutes": rng.choice((2, 3, 5, 8, 10, 12, 15, 20, 25, 30, 40, 45, 60, 90, rng.randrange(1, 100))),
            "ends": time(rng),
        },
        ("ends",),
        (
            "[Set|Start] a timer for {minutes} minutes[, please|].",
            "[Wake me|Tell me when it's over] in {minutes} minutes.",
            "{minutes} minutes, please.",
        ),
        ("[Done|OK]: {minutes} minutes, until {ends}.", "The timer runs until {ends}."),
        "[Set|Start] a timer[, please|].",
        "For how many minutes?",
        "minutes",
    ),
    Deed(
        Function(
            "set_alarm|alarm|wake_up|new_alarm",
            "Set an alarm.|Ring at a time of the day.",
            {"time": needs("time|at|when", "The time, HH:MM.")},
        ),
        lambda rng: {"time": time(rng), "id": words.code(rng, "899")},
        ("id",),
        ("[Wake me|Set an alarm] [at|for] {time}.", "[I have to get up|Alarm] at {time}[, please|]."),
        ("The alarm is set for {time}.", "[Done|OK], {time}."),
        "[Set an alarm|Wake me up tomorrow], please.",
        "At what time?",
        "time",
    ),
    Deed(
        Function(
            "send_message|message|text_person|send_text|write_to",
            "Send a message to a person.|Write to somebody.",
            {
                "person": needs("to|person|recipient|name", "Who gets it."),
                "text": needs("text|message|body|content", "What it says."),
            },
        ),
        lambda rng: {
            "person": person(rng),
            "status": "sent",
            "text": words.say(
                rng,
                (
                    "I'm late",
                    "The meeting is at {t}",
                    "Happy birthday",
                    "See you at {t}",
                    "Please call me back",
                    "I'm at the station",
                    "The key is in the office",
                    "Dinner at {t}?",
                    "Thank you for the book",
                ),
                t=time(rng),
            ),
        },
        ("status",),
        ("[Tell|Text] {person}: {text}", 'Send {person} a message: "{text}"', "[Write|Message] to {person}: {text}"),
        ("[Sent|Done]: {person} gets your message.", "Your message to {person} is on its way."),
        "[Send a message|Write to somebody].",
        "[To whom, and what should it say|Who gets it, and what shall I write]?",
        "",
    ),
    Deed(
        Function(
            "call|phone|dial|call_person",
            "Call somebody.|Phone a person.",
            {"person": needs("name|person|who|contact", "Who is called.")},
        ),
        lambda rng: {"person": person(rng), "number": words.code(rng, "0899 999999"), "status": "ringing"},
        ("number", "status"),
        ("[Call|Phone|Ring] {person}[, please|].", "I want to [talk|speak] to {person}."),
        ("I'm calling {person} on {number}.", "It is ringing: {number}."),
        "[Call somebody for me|Make a call].",
        "[Whom|Who] shall I call?",
        "person",
    ),
    Deed(
        Function(
            "switch_light|light|set_light|turn_light",
            "Switch the light of a room.|Turn a light on or off.",
            {
                "room": needs("room|where|area", "Which room."),
                "state": needs("state|power|to", "on or off.", {"type": "string", "enum": ["on", "off"]}),
            },
        ),
        lambda rng: {"room": rng.choice(ROOMS), "state": rng.choice(("on", "off")), "ok": True},
        ("ok",),
        (
            "[Turn|Switch] {state} the light in the {room}[, please|].",
            "[Light|Lights] {state} in the {room}[, please|].",
        ),
        ("[Done|OK]: the light in the {room} is {state}.", "The {room} light is {state} now."),
    ),
    Deed(
        Function(
            "set_temperature|thermostat|heat|set_heating",
            "Set the temperature of a room.|Heating, in degrees.",
            {
                "room": needs("room|zone|where", "Which room."),
                "degrees": needs("degrees|temperature|celsius", "How warm.", INTEGER),
            },
        ),
        lambda rng: {"room": rng.choice(ROOMS), "degrees": rng.randrange(16, 25), "now": rng.randrange(12, 22)},
        ("now",),
        ("[Make it|Set] {degrees} degrees in the {room}[, please|].", "[Set|Put] the {room} to {degrees} degrees."),
        (
            "The {room} is at {now} degrees and will be {degrees}.",
            "[Done|OK]: {degrees} degrees in the {room}[; it is {now} now|].",
        ),
    ),
    Deed(
        Function(
            "add_task|add_todo|new_task|remember_task|create_task",
            "Write something on the list of tasks.|Add a task.",
            {"task": needs("task|text|title|what", "What has to be done.")},
        ),
        lambda rng: {"task": rng.choice(TASKS).format(name=person(rng)), "tasks": rng.randrange(1, 20)},
        ("tasks",),
        (
            "[Remind me to|I have to|I must not forget to] {task}.",
            "[Add|Put] on my list: {task}.",
            "[New task|To do]: {task}[, please|].",
        ),
        ("[Done|Noted]: {task}. That makes {tasks} on your list.", "It's on the list: {task}."),
        "[Add something to my list|I have a new task].",
        "What [is it|shall I write]?",
        "task",
    ),
    Deed(
        Function(
            "play_music|play|play_song|start_music",
            "Play a song.|Music.",
            {"song": needs("song|title|query|name", "What is played.")},
        ),
        lambda rng: {
            "song": rng.choice((*SONGS, f"{words.town(rng)} Blues", f"Song for {words.given_name(rng)}")),
            "artist": person(rng),
            "minutes": rng.randrange(2, 8),
        },
        ("artist", "minutes"),
        ("[Play|Put on|I want to hear] {song}[, please|].",),
        ("[This is|Now playing] {song} by {artist}.", "{song}, by {artist}, {minutes} minutes."),
        "[Play some music|Put some music on].",
        "[What would you like to hear|Which song]?",
        "song",
    ),
    Deed(
        Function(
            "book_taxi|order_taxi|get_taxi|ride",
            "Order a taxi.|A ride to a place.",
            {
                "place": needs("to|destination|place", "Where it goes."),
                "time": needs("time|at|pickup_time", "When it comes, HH:MM."),
            },
        ),
        lambda rng: {
            "place": rng.choice((city(rng), words.street(rng), "the station", "the airport")),
            "time": time(rng),
            "car": words.code(rng, "AA 999"),
            "price": rng.randrange(8, 80),
        },
        ("car", "price"),
        ("[I need|Order|Get me] a taxi to {place} at {time}[, please|].", "Please book a ride to {place} for {time}."),
        (
            "A taxi ({car}) comes at {time}; the ride to {place} is about {price} euros.",
            "[Done|Booked]: car {car} at {time}, about {price} euros.",
        ),
    ),
)
