"""The words that `seeds.py` makes instructions of."""

from __future__ import annotations


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in " ".join(text.split()).split("|"))


TOPICS = _split("""
    tides|glaciers|thunderstorms|rainbows|caves|wetlands|meadows|hedgehogs|owls|octopuses|
    butterflies|ants|salmon migration|elephants|horses|mushrooms|moss|oak trees|roses|seeds|
    compost|crop rotation|bread|olive oil|honey|noodles|cheese making|street food|picnics|
    school lunches|kitchen knives|table manners|the Silk Road|the Vikings|
    ancient Rome|the Aztecs|the Renaissance|the Black Death|the invention of paper|
    the first railways|the space race|women's suffrage|the Berlin Wall|old coins|family trees|
    folk songs|the violin|choirs|jazz|dance lessons|puppets|comics|watercolours|pottery|knitting|
    carpentry|architecture|stained glass|street photography|haiku|crime novels|fairy tales|
    stage fright|public speaking|writing letters|keeping a diary|speed reading|memory tricks|
    learning a second language|dialects|proverbs|crossword puzzles|chess openings|card games|
    board games for families|juggling|rock climbing|rowing|table tennis|marathons|
    swimming lessons|stretching|sleep|stress|headaches|allergies|first aid|vaccines|teeth|
    the human eye|bones|the heart|blood groups|germs|antibiotics|vitamins|atoms|magnets|
    static electricity|batteries|lasers|mirrors|sound waves|radio|satellites|telescopes|the Moon|
    Jupiter|comets|black holes|gravity|time zones|calendars|maps|compasses|volcanoes|
    earthquakes|rivers|deserts|islands|the Arctic|rainforests|coral reefs|clean water|recycling|
    wind power|solar panels|heat pumps|electric bicycles|trams|bridges|tunnels|lighthouses|
    canals|harbours|airports|container ships|city parks|libraries|museums|markets|
    second-hand shops|budgets|interest rates|insurance|taxes|elections|courts|newspapers|
    advertising|start-ups|trade unions|job interviews|teamwork|giving feedback|saying no|
    meetings|remote work|spreadsheets|passwords|spam|computer viruses|search engines|databases|
    version control|unit tests|algorithms|binary numbers|prime numbers|fractions|probability|
    statistics|graphs and charts|symmetry|optical illusions|logic puzzles|honesty|courage|
    patience|friendship|jealousy|boredom|curiosity|traditions|weddings|birthdays|moving house|
    neighbours|house pets|balcony gardens|night shifts|camping|hiking|travelling alone|souvenirs
""")
TOPIC_FORMS = _split("""
    Tell me about {topic} in five sentences.|Write a short text about {topic} for a school paper.|
    Explain {topic} so that a child understands it.|What should everybody know about {topic}?|
    Give me seven interesting facts about {topic}.|Write a poem of eight lines about {topic}.|
    Write the beginning of a story in which {topic} play a part.|
    How did people see {topic} a hundred years ago, and how do they today?|
    Name three myths about {topic} and correct them.|
    Draw up a plan for a lesson about {topic}, with a goal, steps and a task at the end.|
    What are the pros and cons of spending time on {topic}?|
    Write a conversation between a teacher and a curious pupil about {topic}.|
    Suggest ten questions for a quiz on {topic}, with the answers.|
    I am new to {topic}. Where do I start?|Write a glossary of six words to do with {topic}.|
    Summarize what is known about {topic}. Use bullet points.|
    Write a letter to an editor with an opinion on {topic}.|
    Invent a slogan and a short advertisement about {topic}.|
    What could go wrong with {topic}, and what can be done about it?|
    Describe a picture that shows {topic}.|Why do some people love {topic} and others do not?
""")
CODE_TASKS = _split("""
    counts how often each word comes in a text|finds the second largest number of a list|
    checks whether two strings are anagrams|turns a list of pairs into a dictionary|
    rounds prices to two decimals|splits a list into chunks of n|removes repeated lines of a file|
    validates an e-mail address|computes the sum of the digits of a number|
    finds the longest word of a sentence|transposes a matrix|merges two sorted lists|
    converts minutes to hours and minutes|prints a multiplication table|
    checks whether brackets are balanced|implements a queue with two stacks|
    reads a CSV file and sums a column|generates the first n primes|
    converts a number to binary|counts down from ten with a pause|rotates a list by k places|
    finds all files with a given ending|computes compound interest|draws a triangle of stars|
    sorts people by age and then by name|caches the results of a slow function
""")
CODE_FORMS = _split("""
    Write a Python function that {task}.|Write a JavaScript function that {task}.|
    Write a C++ program that {task}, with comments.|Show me a Java method that {task}.|
    Write tests in Python for a function that {task}.|
    Explain step by step how to write a program that {task}.|Write a shell script that {task}.|
    Write a Python class with a method that {task}, and an example of its use.
""")
SENTENCES = _split("""
    The shop will be closed on Friday because we are moving the shelves.|
    He forgot his umbrella and was soaked when he came home.|
    Our team finished the report two days early, which surprised everyone.|
    I think the soup needs more salt and a bit of lemon.|
    Please send me the photos of the trip when you find the time.|
    The train was late again, so she missed the first half of the concert.|
    In spring the river floods the lower fields, and the farmers wait.|
    We regret to inform you that your application was not successful.|
    My neighbour's dog barks every night between two and three.|
    Sales rose by nine percent in the first quarter and fell slightly in the second.|
    The old clock in the hall stopped the day my grandfather retired.|
    Nobody told the new colleague where the coffee machine was.|
    A good bridge looks light but carries more than one expects.|
    Children learn faster when they are allowed to make mistakes.|
    The museum shows two hundred paintings, most of them for the first time.|
    If you water the plants too often, their roots begin to rot.|
    The mayor promised more buses, but the money is not there yet.|
    She closed the book, looked out of the window and began to laugh.|
    This software update fixes three errors and adds a dark mode.|
    They walked along the harbour until the lights went out.
""")
REWRITE_FORMS = _split("""
    Rewrite this politely: {text}|Say this in simpler words: {text}|
    Make this sound more exciting: {text}|Turn this into the past tense: {text}|
    Translate into Spanish: {text}|Translate into German: {text}|Translate into French: {text}|
    Rewrite this as a question: {text}|Give three other ways to say this: {text}|
    Is the tone of this sentence positive, negative or neutral? Explain. {text}|
    Which words of this sentence are nouns, which are verbs? {text}|
    Continue this text with four more sentences: {text}|Write a headline for this: {text}|
    Correct the mistakes, if there are any: {text}|Rewrite this as a haiku: {text}
""")
SITUATIONS = _split("""
    asking for a day off|cancelling a subscription|inviting a friend to dinner|
    thanking a teacher|apologising for being late|complaining about a noisy flat|
    returning a broken kettle|applying for a summer job|planning a surprise party|
    choosing a first bicycle|studying for three exams in a week|getting up earlier|
    drinking more water|spending less on food|learning to cook|starting a book club|
    looking after a cat|moving to a new city|making friends at work|speaking in front of a class|
    writing a thesis|packing for a week in the rain|fixing a slow computer|
    helping a child with homework|growing tomatoes on a balcony|running a first five kilometres|
    cleaning a small kitchen|planning a weekend trip|saying goodbye to a colleague|
    selling old furniture
""")
ADVICE_FORMS = _split("""
    Write a short message about {what}.|Give me five tips for {what}.|
    I am nervous about {what}. What should I do?|Make a checklist for {what}.|
    Write an e-mail of about eighty words. It is about {what}.|
    What mistakes do people make when {what}?|Describe, step by step, a good way of {what}.|
    Write a dialogue of two friends who talk about {what}.
""")
NAMES = _split("""
    Amira|Bruno|Chiara|Daniel|Elif|Fatima|Georg|Hana|Ivan|Julia|Kenji|Lena|Marco|Nadia|Oscar|
    Priya|Quentin|Rosa|Samuel|Tara|Umut|Vera|Wanda|Yusuf
""")
THINGS = _split("""
    lamps|notebooks|chairs|oranges|candles|postcards|plates|plants|bottles|ropes|hats|keys|
    paintbrushes|envelopes|batteries|cushions
""")
SHOPS = _split("bakery|bookshop|flower stall|hardware store|kiosk|garden centre|tea house|workshop")
PLACES = _split("Lisbon|Oslo|Nairobi|Kyoto|Lima|Montreal|Cairo|Riga|Auckland|Seville|Krakow|Pune")
DAYS = _split("Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday")
MONTHS = _split("January|March|April|June|July|September|October|December")
JOBS = _split("nurse|welder|translator|gardener|pilot|cook|surveyor|librarian|electrician|tailor")
