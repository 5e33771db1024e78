"""The topics of the training prompts: our own lists, one entry per line or separated by semicolons."""

from __future__ import annotations

from build_scripts.corpus import entries

THINGS = entries("""
photosynthesis; the water cycle; volcanoes; earthquakes; black holes; the phases of the moon; tides; rainbows;
lightning; glaciers; coral reefs; the ozone layer; gravity; magnetism; friction; electricity; nuclear fusion;
radio waves; sound; lenses; the human heart; the immune system; digestion; sleep; memory; muscles; bones; the
nervous system; vaccines; antibiotics; allergies; genes; evolution; natural selection; food chains; pollination;
migration of birds; hibernation; camouflage; fossils; dinosaurs; bees; ants; octopuses; whales; bats; spiders;
wolves; elephants; penguins; mushrooms; bacteria; viruses; the periodic table; acids and bases; rust;
combustion; crystals; plastics; soap; steel; glass; concrete; paper; batteries; solar panels; wind turbines;
steam engines; jet engines; refrigerators; microwave ovens; bicycles; elevators; locks; clocks; telescopes;
microscopes; cameras; printing presses; telephones; satellites; rockets; submarines; bridges; dams; tunnels;
lighthouses; skyscrapers; canals; railways; the Roman Empire; ancient Egypt; the Silk Road; the Renaissance; the
Industrial Revolution; the French Revolution; the Black Death; the Vikings; the Ottoman Empire; the Aztecs; the
Cold War; the space race; democracy; monarchy; constitutions; elections; juries; taxes; inflation; interest
rates; stock markets; supply and demand; insurance; mortgages; budgets; trade deficits; unions; advertising;
brands; patents; copyright; contracts; jazz; opera; ballet; impressionism; haiku; sonnets; fables; myths;
detective stories; fairy tales; theatre; cinema; photography; pottery; weaving; calligraphy; chess; football;
tennis; marathons; swimming; climbing; yoga; meditation; cooking rice; baking bread; cheese; chocolate; coffee;
tea; spices; olive oil; honey; salt; compost; gardening in winter; houseplants; composting toilets; recycling;
deserts; rainforests; wetlands; caves; rivers; islands; time zones; maps; compasses; calendars; leap years;
prime numbers; fractions; percentages; probability; averages; triangles; circles; symmetry; infinity; zero;
binary numbers; algorithms; computers; the internet; email; passwords; encryption; databases; search engines;
video games; robots; machine learning; programming languages; operating systems; open-source software;
spreadsheets; cloud computing; computer viruses
""")

SKILLS = entries("""
learn a new language; save money every month; prepare for a job interview; write a good essay; make new friends;
sleep better; start running; eat more vegetables; stop procrastinating; give a speech; train a puppy; take care
of a cat; pack for a week-long trip; move to a new city; find a flat; grow tomatoes on a balcony; clean a
kitchen quickly; remove a stain from a shirt; fix a flat tyre; change a light bulb; paint a room; choose a
laptop; back up photographs; protect a home network; write a cover letter; ask for a raise; plan a birthday
party; host a dinner; cook for six people; bake a cake without eggs; make pancakes; brew coffee without a
machine; read more books; remember names; take notes in class; study for an exam; improve handwriting; play the
guitar; sing in tune; draw a face; take better photographs; learn to swim; stretch after exercise; drink more
water; reduce stress at work; run a meeting; give feedback to a colleague; handle an angry customer; write a
clear email; organize a desk; plan a week; set realistic goals; keep a diary; raise chickens; build a bookshelf;
sharpen a knife; sew a button; iron a shirt; wash wool; pick a ripe melon; store potatoes; freeze bread; save
energy at home; use less plastic; get to work without a car; prepare for a storm; treat a small burn; talk to a
shy child; help a friend who is sad; apologize sincerely; say no politely; teach fractions to a child; explain
death to a child; choose a school; learn to type faster; debug a program; name variables well; start a small
business; sell old furniture; write a product review; negotiate a price; read a contract; open a bank account;
build an emergency fund; pay off debt; plan for retirement; travel cheaply; cope with jet lag; find cheap
flights; camp in the rain; hike alone safely; watch birds; identify constellations; start a book club; learn
chess openings; solve crosswords; organize a neighbourhood clean-up; volunteer at a shelter
""")

PLACES = entries("""
Paris; Tokyo; Cairo; Lima; Nairobi; Oslo; Rome; Istanbul; Mumbai; Sydney; Toronto; Mexico City; Buenos Aires;
Lisbon; Prague; Seoul; Bangkok; Marrakesh; Reykjavik; Athens; Havana; Cape Town; Vienna; Dublin; Helsinki;
Jakarta; Kathmandu; Budapest; Edinburgh; Barcelona; Berlin; Chicago; New Orleans; San Francisco; Vancouver;
Auckland; Singapore; Hanoi
""")

PEOPLE = entries("""
Albert Einstein; Marie Curie; Isaac Newton; Charles Darwin; Galileo Galilei; Ada Lovelace; Alan Turing; Nikola
Tesla; Leonardo da Vinci; Michelangelo; Vincent van Gogh; Frida Kahlo; Wolfgang Amadeus Mozart; Ludwig van
Beethoven; William Shakespeare; Jane Austen; Charles Dickens; Leo Tolstoy; Homer; Socrates; Plato; Aristotle;
Confucius; Cleopatra; Julius Caesar; Genghis Khan; Joan of Arc; Napoleon; Abraham Lincoln; Mahatma Gandhi;
Nelson Mandela; Martin Luther King; Florence Nightingale; Louis Pasteur; Alexander Fleming; Rosalind Franklin;
Stephen Hawking; Neil Armstrong; Amelia Earhart; Christopher Columbus; Marco Polo; Johannes Gutenberg;
Archimedes; Euclid; Emmy Noether
""")

RECIPIENTS = entries("""
my landlord; my neighbour; my grandmother; my old teacher; my boss; a colleague who is leaving; the city
council; a hotel; an airline; my child's school; a friend abroad; my sister; my cousin; the editor of a
newspaper; a supplier; a new customer; my bank; an online shop; the library; a job applicant; my team; a
professor; my doctor's office; a charity; a restaurant; the gym; my insurance company; my roommate; a pen pal;
the parents of my pupils
""")

CONCERNS = entries("""
a broken heater; a late delivery; a noisy party; an invitation to a wedding; a request for a day off; a
thank-you for a gift; an apology for missing a meeting; a change of address; a refund; a lost suitcase; a
birthday; a sick pet; a recommendation; a complaint about cold food; a booking for ten people; a new schedule; a
price increase; a power cut; a farewell; the results of a project; a question about an invoice; a job offer; a
school trip; a donation; a garden fence; a leaking roof; a forgotten umbrella; a new baby; a graduation; a
summer visit; the rent; a parking space; a reference letter; a missed flight; a cancelled concert; a damaged
parcel; help with moving; an overdue book; an internship; a surprise party
""")

CHARACTERS = entries("""
a retired sailor; a young witch; a lonely robot; a clever fox; a baker who cannot taste; a lighthouse keeper; a
shy dragon; a taxi driver; two rival gardeners; a lost astronaut; a talking umbrella; an old piano; a girl who
collects clouds; a detective who is afraid of the dark; a snowman in summer; a forgetful wizard; a brave mouse;
a night nurse; a violin maker; a boy with a paper boat; a city of cats; a mountain guide; a clockmaker; an ant
who wants to fly; a librarian on the moon; a fisherman and a mermaid; a chess champion; a tired king; an honest
thief; a dog who waits
""")

SETTINGS = entries("""
in a small village; on a train at night; at the bottom of the sea; in a desert town; during a snowstorm; in the
year 2300; on the last day of school; in a market; in an abandoned factory; on an island; in a crowded hospital;
at a county fair; under a bridge; in an old castle; on a space station
""")

LISTED = entries("""
things to pack for the beach; healthy snacks; names for a cat; ideas for a rainy afternoon; questions to ask in
an interview; rules for a classroom; gifts for a grandfather; books for teenagers; uses for old newspapers; ways
to save water; hobbies for beginners; vegetables that grow in shade; animals that live in the desert; European
capitals; famous rivers; musical instruments; kinds of pasta; team-building activities; board games; synonyms
for happy; words that rhyme with light; jobs that will matter in the future; exercises without equipment; tools
every home needs; spices for a curry; mistakes of new managers; benefits of walking; features of a good website;
questions for a first date; conversation starters; titles for a mystery novel; slogans for a bakery; names for a
bookshop; topics for a podcast; steps of the scientific method; planets; parts of a flower; layers of the
atmosphere; causes of stress; signs of dehydration; tips for new drivers; breakfasts under ten minutes; low-cost
holidays; Olympic sports; inventions of the last century; habits of good students; ways to reduce food waste;
plants for a dark room; warm-up games for children; things to check before buying a used car; reasons to learn
history; safety rules for a laboratory; items for a first-aid kit; ways to greet people around the world; indoor
activities for toddlers; good questions about a poem; types of clouds; famous paintings; common cooking terms;
chores for children; science-fair projects
""")

GREETINGS = entries("""
Hi!; Hello; Hey, how are you?; Good morning!; What can you do?; Who are you?; Tell me a joke.; I am bored.; I
had a bad day.; I feel nervous about tomorrow.; Can you help me?; What is your favourite colour?; Tell me
something interesting.; I cannot decide what to eat tonight.; My dog ran away.; I passed my exam!; It is raining
again.; I just moved house.; Do you like music?; Are you a person?; What should I watch tonight?; I forgot my
friend's birthday.; I want to learn something new.; I am trying to be healthier.; My boss is difficult.; I miss
my family.; I won a prize today!; I am planning a holiday.; My computer is slow.; I have too much homework.; I
think I am getting a cold.; I cannot sleep.; I broke a vase.; I am meeting my partner's parents.; I want to
adopt a cat.; I am afraid of flying.; I am starting a new job on Monday.; My garden is full of snails.; I burned
dinner.; I have nothing to wear.
""")

FOLLOW_UPS = entries("""
Can you explain that in simpler words?; Give me an example.; Why is that?; Tell me more.; Can you make it
shorter?; Summarize that in one sentence.; What should I do next?; Is that always true?; Put that in a list.;
Can you say it differently?; What is the most important point?; Are there any exceptions?; Who came up with it?;
How long does that take?; What does it cost?; Give me three alternatives.; Turn it into a short poem.; What are
the risks?; Explain it to a ten-year-old.; Thank you! Anything else I should know?
""")

CODE_TASKS = entries("""
reverses a string; checks whether a word is a palindrome; counts the vowels in a text; finds the largest number
in a list; removes duplicates from a list while keeping order; merges two sorted lists; computes the factorial
of a number; returns the n-th Fibonacci number; checks whether a number is prime; lists all primes below n;
computes the greatest common divisor; converts Celsius to Fahrenheit; converts a Roman numeral to an integer;
counts the words in a file; reads a CSV file and sums a column; groups a list of dictionaries by a key; flattens
a nested list; rotates a list by k places; finds the second largest element; sorts a list of tuples by the last
element; implements binary search; implements bubble sort; implements quicksort; implements a stack; implements
a queue with two stacks; reverses a linked list; finds the middle of a linked list; checks balanced parentheses;
finds the longest common prefix; computes the edit distance of two strings; finds all anagrams in a list;
validates an email address; parses a date; computes the number of days between two dates; generates a random
password; shuffles a deck of cards; simulates rolling two dice; draws a triangle of stars; prints a
multiplication table; computes the transpose of a matrix; multiplies two matrices; finds the path through a
maze; traverses a binary tree in order; computes the depth of a tree; finds the shortest path in a graph;
detects a cycle in a graph; counts the islands in a grid; computes compound interest; converts a number to
binary; sums the digits of a number; checks a leap year; finds missing numbers in a sequence; splits a list into
chunks; zips two lists into a dictionary; inverts a dictionary; finds the most common word in a text;
capitalizes every word; removes punctuation from a text; encodes a text with a Caesar cipher; compresses a text
by run lengths; retries a function that fails; measures how long a function takes; caches the results of a
function; downloads a web page; writes a dictionary to a JSON file; renames all files in a folder; watches a
folder for new files; sends a request to an API; counts lines of code in a project; computes a moving average;
normalizes a list of numbers; computes the standard deviation; finds the median; draws a bar chart of a
dictionary; validates a credit-card number; plays tic-tac-toe; plays rock, paper, scissors; keeps a to-do list;
models a bank account as a class; models a library of books as classes
""")

LANGUAGES = (
    ["Python"] * 10 + ["JavaScript"] * 4 + ["Java", "C", "C++", "Go", "Rust", "TypeScript", "Bash", "Ruby"]
)

SQL_TASKS = entries("""
all customers from one city; the ten best-selling products; the average salary of each department; employees
hired in the last year; orders without a customer; duplicate email addresses; the total revenue per month;
students with more than three courses; the second highest salary; products that were never sold; the oldest
customer in each country; the number of visits per day; books borrowed for more than a month; teams without a
manager; the running total of sales
""")

RECORDS = entries(
    """
person: name, age, city; book: title, author, year, genres; recipe: name, servings, ingredients, steps; movie:
title, director, year, rating; event: title, date, place, attendees; product: name, price, currency, in_stock;
weather report: city, temperature, humidity, wind; flight: number, from, to, departure, arrival; contact: name,
phone, email; invoice: number, customer, items, total; song: title, artist, album, length; dog: name, breed,
age, vaccinated; course: title, teacher, credits, days; job advertisement: title, company, salary, skills; hotel
booking: guest, nights, room, breakfast; football match: home, away, score, date; house: address, rooms, area,
price; plant: name, light, water, height; workout: day, exercises, minutes; quiz question: question, options,
answer; country: name, capital, population, languages; planet: name, diameter, moons; bank account: owner,
balance, currency; parcel: sender, receiver, weight, status; to-do item: task, due, done; train: line, stops,
delay; patient: name, age, symptoms; server: host, port, status, uptime; car: make, model, year, electric;
restaurant: name, cuisine, stars, dishes
""".replace(":", "|")
)

NAMES = entries("""
Anna; Ben; Carla; David; Emma; Felix; Grace; Hugo; Ines; Jack; Kofi; Lena; Marco; Nadia; Omar; Priya; Quentin;
Rosa; Sam; Tara; Umar; Vera; Wei; Ximena; Yusuf; Zoe; Aisha; Bruno; Chloe; Diego
""")

OBJECTS = entries("""
apples; marbles; stamps; books; cookies; pencils; eggs; tickets; oranges; cards; bottles; chairs; flowers;
shells; coins; candles; buttons; postcards; bricks; fish; cupcakes; batteries; balloons; bananas; tiles
""")
